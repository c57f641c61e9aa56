"""Packaging of ds_bert: version ranges and extras. requirements.txt holds the exact tested versions."""

import runpy

from setuptools import find_packages, setup

setup(
    name="ds-bert",
    version=runpy.run_path("ds_bert/version.py")["__version__"],
    description="Fast BERT-type pretraining on DeepSpeed",
    python_requires=">=3.10",
    packages=find_packages(include=["ds_bert", "ds_bert.*"]),
    install_requires=[
        "torch>=2.9",
        "deepspeed>=0.19,<0.20",
        "transformers>=5.0,<6",
        "datasets>=4.0",
        "tokenizers>=0.22",
        "safetensors>=0.5",
        "numpy>=1.26",
        "pyarrow>=17",
        "pydantic>=2.7",
        "matplotlib>=3.8",
        "optuna>=4",
        "psutil>=5.9",
        "tqdm>=4.66",
        "ninja>=1.11",
    ],
    extras_require={
        "mpi": ["mpi4py>=4.0"],
        "monitor": ["tensorboard>=2.15", "wandb>=0.17"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.15",
            "sentence-transformers>=5",
            "lightning>=2.5",
        ],
    },
    entry_points={"console_scripts": ["ds-bert = ds_bert.cli.main:main"]},
)
