"""A cable between two network interfaces that delays and loses Ethernet frames, in user space.

Both ends are TAP devices of the kernel; a thread moves the frames from one to the other. It does
what `tc netem` does in kernels that have it, and needs only /dev/net/tun.
"""

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

TUN = Path("/dev/net/tun")
# From linux/if_tun.h.
SET_INTERFACE = 0x400454CA
TAP, NO_PACKET_INFO = 0x0002, 0x1000
MAX_FRAME_BYTES = 1 << 16
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Link:
    """How bad a cable is, in each direction."""

    delay_seconds: float = 0.0
    loss: float = 0.0
    """Probability that a frame is lost."""


class Cable:
    """Creates both interfaces; `start`, after they have been moved to their hosts, connects them.

    A context manager: its exit removes the interfaces. Skips the test if there are no TAP devices.
    """

    def __init__(self, link: Link, *interfaces: str) -> None:
        if not TUN.exists():
            pytest.skip(f"{TUN} does not exist: this kernel cannot delay or lose packets")
        self._link, self._interfaces = link, interfaces
        self._ends: list[int] = []
        self._random = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._move_frames, name="cable", daemon=True)

    def __enter__(self) -> Self:
        for name in self._interfaces:
            end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._ends.append(end)
            fcntl.ioctl(
                end, SET_INTERFACE, struct.pack("16sH", name.encode(), TAP | NO_PACKET_INFO)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)

    def start(self) -> None:
        self._thread.start()

    def _move_frames(self) -> None:
        first, second = self._ends
        selector = selectors.DefaultSelector()
        selector.register(first, selectors.EVENT_READ, second)
        selector.register(second, selectors.EVENT_READ, first)
        frames: list[tuple[float, int, int, bytes]] = []  # a heap: when, number, to, frame
        number = 0
        while not self._stop.is_set():
            wait = frames[0][0] - time.monotonic() if frames else POLL_SECONDS
            for key, _ in selector.select(min(max(wait, 0.0), POLL_SECONDS)):
                with suppress(OSError):  # BlockingIOError: all frames are read; else: link down
                    while True:
                        frame = os.read(key.fd, MAX_FRAME_BYTES)
                        if self._random.random() >= self._link.loss:
                            number += 1
                            when = time.monotonic() + self._link.delay_seconds
                            heapq.heappush(frames, (when, number, key.data, frame))
            while frames and frames[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(frames)
                with suppress(OSError):  # the other end is down, or its queue is full
                    os.write(end, frame)
