"""What a launch needs from the machines it runs on."""
