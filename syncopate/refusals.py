"""What a user can mend."""


class UserError(ValueError):
    """A mistake of the user's words: commands tell it in one line, without a traceback."""
