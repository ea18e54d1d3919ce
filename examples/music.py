"""Music from MIDI files to MIDI files: MidiTok, prepare, train, evaluate, continue a piece.

    pip install miditok
    python examples/music.py --out music                     # short pieces made here
    python examples/music.py --out music --midi CHORALES/    # your own

A piece is a document, so no piece sees another, and the memory carries a piece over segments. Each
call writes below `--out`: tokens/, names.json, data/, run/ and continued.mid.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import miditok
import symusic

from txl_dist import (
    Sampling,
    TrainSpec,
    evaluate,
    evaluation_spec,
    find_launcher,
    find_model,
    generate_tokens,
    load_run_config,
    prompt_tokens,
)

CONFIG = Path(__file__).parents[1] / "configs/modern/quickstart.yaml"
TGT_LEN, NUM_LANES = 64, 8
TOKENIZER = miditok.TokenizerConfig(
    special_tokens=["PAD", "EOS"], num_velocities=4, use_tempos=False, use_time_signatures=False
)
"""REMI: Bar, Position, Pitch, Velocity and Duration tokens, one vocabulary for all."""
TICKS = 480
"""Per quarter note, in the pieces made here."""


def main() -> None:
    """Read the command line and run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="new directory")
    parser.add_argument("--midi", type=Path, help="directory of .mid files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--notes", type=int, default=64, help="to continue the piece with")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True)
    midi = arguments.midi or make_pieces(out / "midi")

    tokenizer = miditok.REMI(TOKENIZER)
    tokenize(tokenizer, midi, out)
    prepare(tokenizer, out)
    train(out, num_steps=arguments.steps)
    result = evaluate(evaluation_spec(out / "run", out / "data", split="valid"))
    print(f"valid: perplexity {result.sums.perplexity:.2f} per token")
    piece = sorted((out / "tokens").glob("*.json"))[0]
    continue_piece(tokenizer, piece, out, num_notes=arguments.notes)


def make_pieces(directory: Path, num_pieces: int = 40) -> Path:
    """Write pieces of two alternating phrases, each in its own key: repetition to remember."""
    directory.mkdir()
    for number in range(num_pieces):
        random_ = random.Random(number)
        scale = [key + step for key in [random_.randrange(55, 67)] for step in (0, 2, 4, 5, 7, 9)]
        phrases = [random_.choices(scale, k=8) for _ in range(2)]
        score, track = symusic.Score(TICKS), symusic.Track()
        pitches = [pitch for phrase in phrases * 8 for pitch in phrase]
        for position, pitch in enumerate(pitches):
            track.notes.append(symusic.Note(position * TICKS, TICKS, pitch, 100))
        score.tracks.append(track)
        score.dump_midi(directory / f"piece-{number:02}.mid")
    return directory


def tokenize(tokenizer: miditok.REMI, midi: Path, out: Path) -> None:
    """Write the ids of every file as MidiTok's JSON, and the names of all ids."""
    (out / "tokens").mkdir()
    for path in sorted(midi.glob("*.mid")):
        tokenizer.save_tokens(tokenizer(path), out / "tokens" / f"{path.stem}.json")
    # MidiTok stores no vocabulary of a tokenizer that is not trained.
    (out / "names.json").write_text(json.dumps(tokenizer.vocab))


def prepare(tokenizer: miditok.REMI, out: Path) -> None:
    """Shards with checksums; whole pieces are held out."""
    command = [
        sys.executable, "-m", "txl_dist", "prepare", out / "tokens", "--out", out / "data",
        "--format", "ids", "--vocab-size", len(tokenizer.vocab), "--names", out / "names.json",
        "--end-of-document", "EOS_None", "--split", "valid=0.1", "--shuffle", 1,
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True)


def train(out: Path, *, num_steps: int) -> None:
    """Train in another process, as `txl train --on processes` does."""
    config = load_run_config(
        CONFIG,
        [
            f"directory={out / 'run'}",
            f"data.path={out / 'data'}",
            f"data.tgt_len={TGT_LEN}",
            f"data.num_lanes={NUM_LANES}",
            "data.lanes_per_step=null",
            f"training.num_steps={num_steps}",
            f"optimizer.warmup_steps={min(50, num_steps // 4)}",
            f"evaluation.interval_steps={num_steps}",
            "tracking.enabled=false",
        ],
    )
    find_launcher("processes").train(TrainSpec(config=config), num_ranks=1, on_line=print)


def continue_piece(tokenizer: miditok.REMI, piece: Path, out: Path, *, num_notes: int) -> None:
    """Read the first half of a piece, draw the rest, and write both as one MIDI file."""
    model, vocabulary = find_model(out / "run").load_with_tokenizer()
    (ids,) = json.loads(piece.read_text())["ids"]
    begun = ids[: len(ids) // 2]
    names = {id_: name for name, id_ in tokenizer.vocab.items()}
    prompt = prompt_tokens(vocabulary, " ".join(names[token] for token in begun))
    drawn = generate_tokens(
        model, prompt, tgt_len=TGT_LEN, sampling=Sampling(temperature=0.8), seed=1
    )
    end, new = tokenizer.vocab["EOS_None"], []
    pitches = {id_ for name, id_ in tokenizer.vocab.items() if name.startswith("Pitch")}
    for token in drawn:
        if token == end or sum(each in pitches for each in new) == num_notes:
            break
        new.append(token)
    score = tokenizer.decode([miditok.TokSequence(ids=begun + new)])
    score.dump_midi(out / "continued.mid")
    num_begun = sum(each in pitches for each in begun)
    print(f"{piece.stem}: {num_begun} notes read, {score.note_num() - num_begun} drawn")
    print(f"wrote {out / 'continued.mid'}")


if __name__ == "__main__":
    main()
