"""A loader that a script derives, and a mix-in that loads ahead on a thread."""

import threading
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

WAIT_S = 0.1  # between two looks whether the loader was closed
CLOSE_S = 5.0  # for the thread to end, which may be inside of the script's `_iterate`


class BaseDataLoader:
    """A loader: a class of the script has `_iterate`, and `__len__` in batches."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one pass."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return the batch as the training gets it."""
        return batch


class _End(NamedTuple):
    """The end of a pass, and the error that has ended it."""

    error: Exception | None = None


class AsyncDataLoaderMixin:
    """Loads ahead: `class Loader(AsyncDataLoaderMixin, BaseDataLoader): ...`.

    Each pass has a thread that fills a queue; leaving the loop ends it.

    Args:
        async_loader_queue_size: batches that may wait; 0: no thread.
        debug_data_loader: Horovod prints each batch then; here it does nothing.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._closing: threading.Event | None = None  # of the pass that runs
        self._thread: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread of the pass that runs, and forget its batches."""
        if self._closing is not None and self._thread is not None:
            self._closing.set()
            self._thread.join(CLOSE_S)
        self._closing = self._thread = None

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():  # type: ignore[attr-defined] # of the other base
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        self.close_async_loader()
        queue: Queue[Any] = Queue(self.async_loader_queue_size)
        self._closing = closing = threading.Event()
        self._thread = threading.Thread(
            target=self._load, args=(queue, closing), name="hvd-loader", daemon=True
        )
        self._thread.start()
        try:
            while not closing.is_set():
                try:
                    batch = queue.get(timeout=WAIT_S)
                except Empty:
                    continue
                if isinstance(batch, _End):
                    if batch.error is not None:
                        raise batch.error
                    return
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            closing.set()

    def _load(self, queue: "Queue[Any]", closing: threading.Event) -> None:
        """Fill the queue with the batches of one pass, and its end."""
        end = _End()
        try:
            for batch in self._iterate():  # type: ignore[attr-defined]
                if not _put(queue, batch, closing):
                    return
        except Exception as error:  # of the script: raised in its loop
            end = _End(error)
        _put(queue, end, closing)


def _put(queue: "Queue[Any]", item: object, closing: threading.Event) -> bool:
    """Put an item; return False where the loader was closed meanwhile."""
    while not closing.is_set():
        try:
            queue.put(item, timeout=WAIT_S)
        except Full:
            continue
        return True
    return False
