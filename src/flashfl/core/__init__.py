"""The nouns of sparse federated learning and the loop that uses them."""
