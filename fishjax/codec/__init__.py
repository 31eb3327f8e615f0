"""The codec: sound to codes and back."""
