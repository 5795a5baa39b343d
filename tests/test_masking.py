"""What looks like a secret is not shown, and what does not is shown as it is."""

from __future__ import annotations

import pytest

from elastic_driver.options import is_secret, masked


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --db.password=abc", "train.py --db.password=***"),
        ("env WANDB_API_KEY=abc HF_HOME=/h python", "env WANDB_API_KEY=*** HF_HOME=/h python"),
        ("train.py --hub_token abc", "train.py --hub_token ***"),
        ("train.py --data s3://me:abc@host/x", "train.py --data s3://me:***@host/x"),
        ("train.py --token --quiet", "train.py --token --quiet"),
        (
            "train.py --tokenizer gpt2 --max-tokens=512 --key-dim 64 monkey=1 --keys a",
            "train.py --tokenizer gpt2 --max-tokens=512 --key-dim 64 monkey=1 --keys a",
        ),
    ],
)
def test_values_of_options_and_variables_named_like_secrets_are_masked(
    words: str, shown: str
) -> None:
    assert masked(words.split()) == tuple(shown.split())


def test_a_variable_is_a_secret_by_a_part_of_its_name() -> None:
    assert is_secret("HF_TOKEN")
    assert is_secret("db_password")
    assert not is_secret("OMP_NUM_THREADS")
