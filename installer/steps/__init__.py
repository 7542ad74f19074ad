"""The installer's steps, one noun each. Standard library only: nothing of the appliance is imported here."""
