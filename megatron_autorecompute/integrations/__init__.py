"""Ways into other programs' training jobs, one file for each; nothing else imports these."""
