"""What is asked of sampling: parameters, masks and grammars."""
