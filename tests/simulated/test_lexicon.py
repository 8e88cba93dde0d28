"""A simulated engine that speaks with a real tokenizer's tokens."""

from pathlib import Path

import pytest
from sim_rig import Rig, greedy, say, some_ids
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvloop.engine.settings import EngineSettings
from kvloop.engine.simulated.lexicon import Tokenized
from kvloop.engine.simulated.settings import SimulatedSettings

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE, whose single bytes above 127 are no text of their own."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(name, normalized=False, special=True) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    place = tmp_path_factory.mktemp("model")
    made.save(str(place / "tokenizer.json"))
    return place


async def test_answers_are_text_of_the_tokenizer(rig: Rig, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = await rig.engine(tokenizer=str(folder), vocab_size=tokenizer.get_vocab_size())
    prompt = [token % 500 for token in some_ids(30)]
    said = await say(engine, prompt, sampling=greedy(40))
    assert said.text == tokenizer.decode(said.ids, skip_special_tokens=False)
    assert "\ufffd" not in said.text
    assert min(said.ids) >= len(SPECIALS)
    assert len(set(said.ids)) > 10
    stop = said.text[20:24]
    assert (await say(engine, prompt, sampling=greedy(40, stop=[stop]))).text == said.text[
        : said.text.index(stop)
    ]


def test_special_tokens_and_parts_of_characters_are_not_spoken(folder: Path) -> None:
    lexicon = Tokenized(str(folder), 600)
    spoken = {lexicon.token(number) for number in range(1_000)}
    assert lexicon.word(1) == ""
    assert not spoken & {0, 1, 2}
    assert all("\ufffd" not in lexicon.word(token) for token in spoken)
    assert len({Tokenized(str(folder), 50).token(number) for number in range(1_000)}) < 50


def test_the_vocabulary_is_the_tokenizers(folder: Path) -> None:
    settings = EngineSettings(engine="simulated", extra_engine_args={"tokenizer": str(folder)})
    made = SimulatedSettings.from_engine_settings(settings)
    assert made.vocab_size == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    with pytest.raises(ValueError, match="name the folder of a fetched model"):
        SimulatedSettings.from_engine_settings(
            EngineSettings(engine="simulated", extra_engine_args={"tokenizer": str(folder / "none")})
        )
