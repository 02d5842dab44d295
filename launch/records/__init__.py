"""What runs leave on disk, and what is known from it: run folders, provenance, the ledger."""
