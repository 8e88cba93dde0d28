"""A model folder for dummy weights: a shape (config.json), and a tokenizer with a word for every id.

    python shape.py SHAPE_FOLDER FOLDER

The word of id 17 is "w17", so that answers are text and stop strings can be tried without a checkpoint.
"""

import json
import shutil
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def main(shape: Path, folder: Path) -> None:
    """Write the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    shutil.copyfile(shape / "config.json", folder / "config.json")
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
