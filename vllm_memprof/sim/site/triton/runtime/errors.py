class TritonError(Exception):
    pass


class OutOfResources(TritonError):
    """A kernel needs more on-chip memory than there is. Never raised here: kernels are not
    compiled."""

    def __init__(self, required=0, limit=0, name=""):
        super().__init__(f"out of resource: {name}, required {required}, limit {limit}")
        self.required, self.limit, self.name = required, limit, name


class InterpreterError(TritonError):
    pass


class PTXASError(TritonError):
    pass
