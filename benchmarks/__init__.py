"""Speed, measured side by side in one run; never a test. See docs/results.md."""
