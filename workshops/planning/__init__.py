"""What would fit on an instance: plans from config.json files alone; `doctor` says what is here."""
