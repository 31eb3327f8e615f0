"""Text to prompt: tokenizer, prompt matrices, splitting of long text."""
