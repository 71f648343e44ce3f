"""Data sets by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..core.errors import unknown
from . import cifar, digits, femnist, folder, hub, idx, sst2, tinyimagenet
from .dataset import DataSet, Form, Info, Options

_CIFAR = "https://www.cs.toronto.edu/~kriz"

_KNOWN = (
    Info(
        name="digits",
        about="8x8 digits, installed with scikit-learn",
        train=1437,
        test=360,
        classes=10,
        shape=(1, 8, 8),
        model="digits",
        forms=(Form((), digits.load),),
    ),
    Info(
        name="mnist",
        about="handwritten digits",
        train=60_000,
        test=10_000,
        classes=10,
        shape=(1, 28, 28),
        model="mnistnet",
        forms=idx.MNIST,
        get="Get the four IDX files, gzipped or not, from https://ossci-datasets.s3.amazonaws.com/mnist/ and put them "
        "into the folder mnist/",
        megabytes=12,
    ),
    Info(
        name="mnist-writers",
        about="MNIST with who wrote each training digit, from QMNIST's extended labels",
        train=60_000,
        test=10_000,
        classes=10,
        shape=(1, 28, 28),
        model="mnistnet",
        forms=idx.MNIST_WRITERS,
        get="Get MNIST (see there), and qmnist-train-labels-idx2-int.gz from "
        "https://github.com/facebookresearch/qmnist into the folder qmnist/",
        megabytes=13,
    ),
    Info(
        name="fashion-mnist",
        about="small pictures of clothes",
        train=60_000,
        test=10_000,
        classes=10,
        shape=(1, 28, 28),
        model="mnistnet",
        forms=idx.FASHION,
        get="Get the four IDX files from https://github.com/zalandoresearch/fashion-mnist and put them into the folder "
        "fashion-mnist/",
        megabytes=31,
    ),
    Info(
        name="cifar10",
        about="small colour photographs, 10 classes",
        train=50_000,
        test=10_000,
        classes=10,
        shape=(3, 32, 32),
        model="resnet18",
        forms=cifar.CIFAR10,
        get=f"Unpack {_CIFAR}/cifar-10-python.tar.gz (or cifar-10-binary.tar.gz) there",
        megabytes=177,
    ),
    Info(
        name="cifar100",
        about="small colour photographs, 100 classes",
        train=50_000,
        test=10_000,
        classes=100,
        shape=(3, 32, 32),
        model="resnet18",
        forms=cifar.CIFAR100,
        get=f"Unpack {_CIFAR}/cifar-100-python.tar.gz (or cifar-100-binary.tar.gz) there",
        megabytes=178,
    ),
    Info(
        name="tinyimagenet",
        about="colour photographs of 64x64 pixels, 200 classes",
        train=100_000,
        test=10_000,
        classes=200,
        shape=(3, 64, 64),
        model="resnet18",
        forms=tinyimagenet.TINY,
        get="Unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there; it needs the pillow package, and 1.4 GB "
        "more for the array it is kept as",
        megabytes=480,
    ),
    Info(
        name="femnist",
        about="handwritten letters and digits by writer, from LEAF",
        train=0,
        test=0,
        classes=62,
        shape=(1, 28, 28),
        model="leafcnn",
        forms=femnist.FEMNIST,
        get="Make it with LEAF (https://github.com/TalwalkarLab/leaf): in data/femnist run ./preprocess.sh -s niid "
        "--sf 1.0 -k 0 -t sample, then put data/train and data/test into the folder femnist/",
        megabytes=5000,
    ),
    Info(
        name="sst2",
        about="film critics' phrases, good or bad, from GLUE",
        train=67_349,
        test=872,
        classes=2,
        shape=(64,),
        model="bert",
        forms=sst2.SST2,
        get="Unpack https://dl.fbaipublicfiles.com/glue/data/SST-2.zip there; a pretrained BERT (config.json, "
        "vocab.txt, model.safetensors) goes into the folder bert-base-uncased/",
        megabytes=5,
    ),
)
DATASETS: dict[str, Info] = {info.name: info for info in _KNOWN}


def info(name: str) -> Info:
    """What is known of the data set `name`; of hub:NAME and folder:PATH that is nothing but how to read them."""
    kind, colon, rest = name.partition(":")
    if name in DATASETS:
        return DATASETS[name]
    if colon and rest and kind == "hub":
        return Info(name, "from the Hugging Face hub", 0, 0, 0, (), "", (Form((), partial(_hub, rest)),))
    if colon and rest and kind == "folder":
        return Info(name, "a folder of images", 0, 0, 0, (), "", (Form((), partial(_folder, rest)),))
    raise unknown("data set", name, [*DATASETS, "hub:NAME", "folder:PATH"])


def _hub(name: str, paths: list[Path], options: Options) -> DataSet:
    return hub.load(name, options)


def _folder(path: str, paths: list[Path], options: Options) -> DataSet:
    return folder.load(Path(path).expanduser(), options)


def load(name: str, root: Path, options: Options = Options()) -> DataSet:  # noqa: B008 - frozen
    """The data set `name`."""
    return info(name).load(root, options)
