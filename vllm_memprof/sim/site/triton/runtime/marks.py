"""What a kernel that computes on the host says of itself."""


def writes(*names, any_size=False):
    """Marks a host kernel with the arguments it writes to.

    ``any_size``: no limit holds for them, because they steer the engine and are a few numbers per
    token.
    """

    def mark(function):
        function.written = names
        function.any_size = any_size
        return function

    return mark
