"""As much of Triton's intermediate representation as torch reads to learn which arguments a kernel
writes to.

torch (``_higher_order_ops/triton_kernel_wrap.py::identify_mutated_tensors``) walks a module's
operations and follows the pointers of its stores. A kernel's module here is one function with one
block: a ``tt.store`` per tensor argument that the kernel's source writes to, straight to that
argument.
"""

import itertools

_ids = itertools.count(1)


class _Node:
    """Whatever torch asks for its id."""

    def __init__(self):
        self._id = next(_ids)

    def id(self):
        return self._id


class block(_Node):
    def __init__(self, arguments, parent):
        super().__init__()
        self._arguments, self._parent = arguments, parent

    def get_num_arguments(self):
        return len(self._arguments)

    def get_argument(self, index):
        return self._arguments[index]

    def get_parent(self):
        return self._parent


class operation:
    def __init__(self, name, operands=(), regions=(), parent=None, attributes=None):
        self._name, self._operands, self._regions = name, operands, regions
        self._parent, self._attributes = parent, attributes or {}

    def get_name(self):
        return self._name

    def get_num_operands(self):
        return len(self._operands)

    def get_operand(self, index):
        return self._operands[index]

    def get_num_results(self):
        return 0

    def get_num_regions(self):
        return len(self._regions)

    def get_region(self, index):
        return self._regions[index]

    def get_block(self):
        return self._parent

    def get_str_attr(self, name):
        return self._attributes[name]


class module:
    """The module of a kernel.

    Args:
        name: of the kernel.
        arguments: names of its tensor arguments, in order.
        written: those that it writes to.
    """

    def __init__(self, name, arguments, written):
        values = {argument: _Node() for argument in arguments}
        region = _Node()
        body = block(list(values.values()), region)
        self.operations = [operation("tt.store", (values[argument],), parent=body)
                           for argument in arguments
                           if argument in written]  # fmt: skip
        self.operations.append(operation("tt.return", parent=body))
        self.operations.append(
            operation("tt.func", regions=(region,), attributes={"sym_name": name})
        )
        self.operations.append(operation("builtin.module"))

    def verify(self):
        return True

    def walk(self, visit):
        """Inner operations first."""
        for each in self.operations:
            visit(each)


class context:
    pass


def load_dialects(context):
    pass
