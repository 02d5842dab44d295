"""Where ranks run and who starts them: this machine, hosts of a file, nodes of a job."""
