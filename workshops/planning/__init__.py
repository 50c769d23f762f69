"""Plans of instances from config.json alone, and the doctor of this machine."""
