"""A stand-in for torch whose tensors have shapes and no values: enough for llama.cpp's converter to rename, split, merge and
reorder the tensors of a model that is not there. Importing this module installs it as `torch`, and an empty `transformers`."""
import math
import statistics
import sys
import types


class Dtype:
    def __init__(self, name):
        self.name = name
        self.itemsize = 4

    def __repr__(self):
        return f"torch.{self.name}"


class Tensor:
    """A shape. Arithmetic keeps it, comparisons with values are false."""

    __array_ufunc__ = None

    def __init__(self, *shape):
        self.shape = Shape(int(n) for n in shape)
        self.dtype = DTYPES["bfloat16"]
        self.data = self

    ndim = property(lambda self: len(self.shape))
    T = property(lambda self: Tensor(*reversed(self.shape)))
    mT = property(lambda self: self.transpose(-1, -2))
    device = "cpu"

    def dim(self):
        return self.ndim

    def size(self, d=None):
        return self.shape if d is None else self.shape[d]

    def numel(self):
        return math.prod(self.shape)

    def reshape(self, *shape):
        shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        if -1 in shape:
            rest = math.prod(n for n in shape if n != -1)
            shape[shape.index(-1)] = self.numel() // rest
        assert math.prod(shape) == self.numel(), (self.shape, shape)
        return Tensor(*shape)

    def view(self, *shape):
        return self if len(shape) == 1 and isinstance(shape[0], Dtype) else self.reshape(*shape)

    def reshape_as(self, other):
        return self.reshape(*other.shape)

    def permute(self, *order):
        order = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
        return Tensor(*(self.shape[d] for d in order))

    def transpose(self, a, b):
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return Tensor(*shape)

    swapaxes = transpose

    def t(self):
        return self.T

    def flatten(self, *_):
        return Tensor(self.numel())

    def squeeze(self, d=None):
        if d is None:
            return Tensor(*(n for n in self.shape if n != 1))
        d %= self.ndim
        return Tensor(*(n for i, n in enumerate(self.shape) if i != d or n != 1))

    def unsqueeze(self, d):
        shape = list(self.shape)
        shape.insert(d if d >= 0 else d + self.ndim + 1, 1)
        return Tensor(*shape)

    def split(self, sizes, dim=0):
        n = self.shape[dim]
        sizes = [sizes] * (n // sizes) if isinstance(sizes, int) else list(sizes)
        assert sum(sizes) == n, (self.shape, sizes)
        return tuple(self._with(dim, size) for size in sizes)

    def chunk(self, n, dim=0):
        return self.split(self.shape[dim] // n, dim)

    def _with(self, dim, n):
        shape = list(self.shape)
        shape[dim] = n
        return Tensor(*shape)

    def expand(self, *shape):
        return Tensor(*shape)

    def repeat(self, *times):
        return Tensor(*(n * t for n, t in zip(self.shape, times)))

    def repeat_interleave(self, n, dim=0):
        return self._with(dim, self.shape[dim] * n)

    def index_select(self, dim, index):
        return self._with(dim, index.numel())

    def any(self):
        return False

    def all(self):
        return True

    def tolist(self):
        return [1.0] * self.numel()

    def item(self):
        return 1.0

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        if Ellipsis in key:
            at, missing = key.index(Ellipsis), self.ndim - (len(key) - 1 - key.count(None))
            key = key[:at] + (slice(None),) * missing + key[at + 1:]
        shape, rest = [], list(self.shape)
        for k in key:
            if k is None:
                shape.append(1)
            elif isinstance(k, slice):
                shape.append(len(range(*k.indices(rest.pop(0)))))
            elif isinstance(k, Tensor):
                rest.pop(0)
                shape.extend(k.shape)
            elif isinstance(k, (list, tuple)):
                rest.pop(0)
                shape.append(len(k))
            else:
                rest.pop(0)
        return Tensor(*shape, *rest)

    def __setitem__(self, key, value):
        pass

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(self.shape[0]))

    def __bool__(self):
        return False

    def _same(self, *_, **__):
        return self

    def _binary(self, other, *_, **__):
        if not isinstance(other, Tensor):
            return self
        a, b = [1] * (other.ndim - self.ndim) + list(self.shape), [1] * (self.ndim - other.ndim) + list(other.shape)
        return Tensor(*(max(x, y) for x, y in zip(a, b)))


for name in "contiguous float half to type clone detach cpu cuda exp neg abs sqrt bfloat16 numpy clamp double int".split():
    setattr(Tensor, name, Tensor._same)
for name in "add sub mul truediv pow rpow radd rsub rmul rtruediv eq ne lt gt le ge".split():
    setattr(Tensor, f"__{name}__", Tensor._binary)
Tensor.__neg__ = Tensor._same
Tensor.__hash__ = object.__hash__


class Shape(tuple):
    def numel(self):
        return math.prod(self)


NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool float8_e4m3fn float8_e5m2 float"
DTYPES = {name: Dtype(name) for name in NAMES.split()}


class Quantile:
    """A quantile of the normal distribution; the converter writes it to the metadata."""

    def __init__(self, p):
        self.p = p.value

    def item(self):
        return statistics.NormalDist().inv_cdf(self.p) if self.p > 0 else float("-inf")


def stack(tensors, dim=0):
    shape = list(tensors[0].shape)
    shape.insert(dim, len(tensors))
    return Tensor(*shape)


def cat(tensors, dim=0):
    return tensors[0]._with(dim, sum(t.shape[dim] for t in tensors))


def tensor(values, **_):
    shape, value = [], values
    while isinstance(values, (list, tuple)):
        shape.append(len(values))
        values = values[0] if values else None
    made = Tensor(*(shape or [1]))
    made.value = value
    return made


def shape_of(*shape, **kwargs):
    shape = kwargs.get("size", shape)
    return Tensor(*(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape))


torch = types.ModuleType("torch")
torch.Tensor, torch.dtype, torch.Size = Tensor, Dtype, Shape
vars(torch).update(DTYPES)
vars(torch).update(stack=stack, cat=cat, concat=cat, tensor=tensor, empty=shape_of, zeros=shape_of, ones=shape_of, full=shape_of)
torch.arange = lambda a, b=None, step=1, **_: Tensor(len(range(*((0, int(a)) if b is None else (int(a), int(b))), int(step))))
for name in "exp sqrt neg abs zeros_like ones_like empty_like log".split():
    setattr(torch, name, lambda x, *_, **__: x)
torch.split = lambda x, sizes, dim=0: x.split(sizes, dim)
torch.chunk = lambda x, n, dim=0: x.chunk(n, dim)
torch.permute = lambda x, order: x.permute(order)
torch.transpose = lambda x, a, b: x.transpose(a, b)
torch.reshape = lambda x, shape: x.reshape(shape)
torch.squeeze, torch.unsqueeze, torch.flatten = Tensor.squeeze, Tensor.unsqueeze, Tensor.flatten
torch.any, torch.all, torch.is_tensor = lambda x: False, lambda x: True, lambda x: isinstance(x, Tensor)
torch.from_numpy = lambda x: Tensor(*x.shape)
torch.count_nonzero = lambda x: 0
torch.equal = lambda a, b: a.shape == b.shape
torch.allclose = lambda *_, **__: True
normal = types.SimpleNamespace(Normal=lambda *_: types.SimpleNamespace(icdf=Quantile))
torch.distributions = types.SimpleNamespace(normal=normal)
torch.nn = types.ModuleType("torch.nn")
torch.nn.functional = types.ModuleType("torch.nn.functional")
sys.modules.update({"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional})

safetensors = types.ModuleType("safetensors.torch")
safetensors.load_file = None
sys.modules.update({"safetensors": types.ModuleType("safetensors"), "safetensors.torch": safetensors})
transformers = types.ModuleType("transformers")


class AutoConfig:
    @staticmethod
    def from_pretrained(*_, **__):
        raise OSError("no configuration")


transformers.AutoConfig = AutoConfig
sys.modules["transformers"] = transformers
