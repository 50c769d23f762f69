"""What is here and what would fit: detection of Neuron software, and plans from config.json files alone."""
