"""What any process of a run needs from its surroundings. Imports no torch."""
