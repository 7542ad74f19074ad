"""The installer's steps, one noun each. Standard library only: imports nothing of the appliance."""
