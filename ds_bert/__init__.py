"""ds_bert: fast BERT-type pretraining on DeepSpeed."""

__version__ = "0.1.0"
