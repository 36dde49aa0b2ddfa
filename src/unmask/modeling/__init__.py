"""The three blocks: any transformers encoder, our decoder, the LM head; and the way back to stock transformers."""
