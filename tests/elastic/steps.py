"""How the weights of the test program grow."""

STEPS = 40


def weight(step: int) -> float:
    """Return what each weight is after so many steps."""
    return step * (step + 1) / 2
