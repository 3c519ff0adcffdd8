"""Train the flight delay network on January to June and write the files that go with it.

    python -m inference_dags.defs.flight_delay.train

Writes carriers.txt, origins.txt, dests.txt (one value a line, sorted; the id is the line number from 0) and
weights.safetensors beside this file: the same bytes each time on one machine. The vocabularies come from the
training months alone, so an airport first served in July is an unknown category.
"""

import pandas as pd
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from inference_dags.defs.flight_delay.land import CATEGORICAL, NUMERIC, flights_2013
from inference_dags.defs.flight_delay.model import FOLDER, FlightDelay, vocabulary

EPOCHS = 3
BATCH = 1024
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 4.0  # strong: spring holds only in part for autumn; it also keeps the embeddings small


def months(first: int, last: int) -> pd.DataFrame:
    """The flights of these months of 2013, both included."""
    return flights_2013().loc[f"2013-{first:02}-01" : f"2013-{last:02}-31"]


def usable(flights: pd.DataFrame) -> pd.DataFrame:
    """The rows the network can score and be judged on: no nulls, known categories only."""
    known = [flights[name].isin(vocabulary(name)) for name in CATEGORICAL]
    return flights[pd.concat(known, axis=1).all(axis=1)].dropna()


def inputs(flights: pd.DataFrame) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """numeric float32 [N, K], then the ids of carrier, origin and dest, int32 [N] each."""
    numeric = torch.from_numpy(flights[[*NUMERIC]].to_numpy("float32"))
    carrier, origin, dest = (
        torch.from_numpy(pd.Index(vocabulary(name)).get_indexer(flights[name]).astype("int32")) for name in CATEGORICAL
    )
    return numeric, carrier, origin, dest


def auc(late: pd.Series, score: Tensor) -> float:
    """Area under the ROC curve by the Mann-Whitney rank sum, ties counted half."""
    positive = late.to_numpy(bool)
    ranks = pd.Series(score.numpy()).rank().to_numpy()
    n, p = len(positive), int(positive.sum())
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * (n - p)))


def train() -> FlightDelay:
    """The network after EPOCHS passes over the usable rows of January to June."""
    # One thread and fixed seeds: sums in a fixed order give the same bytes each time.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    flights = usable(months(1, 6))
    columns = inputs(flights)
    late = torch.from_numpy(flights["late"].to_numpy("float32"))  # [N]
    std, mean = torch.std_mean(columns[0].double(), dim=0)
    carriers, origins, dests = (len(vocabulary(name)) for name in CATEGORICAL)
    network = FlightDelay(mean.float(), std.float(), carriers, origins, dests)
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=WEIGHT_DECAY)
    steps = len(late) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(late)), BATCH)[:steps]:
            loss = binary_cross_entropy_with_logits(network.logit(*(c[rows] for c in columns)), late[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    return network.eval()


def main() -> None:
    for name in CATEGORICAL:
        values = sorted(set(months(1, 6)[name]))
        (FOLDER / f"{name}s.txt").write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
    network = train()
    save_file(network.state_dict(), FOLDER / "weights.safetensors")
    for first, last in ((1, 6), (7, 9), (10, 12)):
        flights = usable(months(first, last))
        with torch.inference_mode():
            score = network.logit(*inputs(flights))
        print(f"months {first}-{last}: {len(flights)} rows, AUC {auc(flights['late'], score):.4f}")


if __name__ == "__main__":
    main()
