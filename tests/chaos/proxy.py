"""A network that misbehaves: a TCP proxy in front of one engine, which is told from another thread what to do."""

import asyncio
import threading
import time
from contextlib import suppress

CHUNK = 4096


class Proxy:
    """Listens on a free port of the loopback and passes everything on to `target` there. `mode`:

    open    as it is
    delay   every piece is held back for `delay` seconds
    refuse  new connections are closed at once, and `mode` sets back those that are open
    silent  whatever comes is taken and nothing is passed on; connections stay open
    cut     the next answer is passed on by half, then its connection is closed; then `open` again
    """

    def __init__(self, target: int) -> None:
        self.target, self.mode, self.delay = target, "open", 0.0
        self.cuts = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.port = 0

        def work() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))  # pyright: ignore
            self.port = self._server.sockets[0].getsockname()[1]  # pyright: ignore
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        if not ready.wait(10.0):
            raise TimeoutError("the proxy did not start")

    def become(self, mode: str, delay: float = 0.0) -> None:
        self.delay, self.mode = delay, mode
        if mode == "refuse":
            self._loop.call_soon_threadsafe(lambda: [w.transport.abort() for w in tuple(self._writers)])

    def close(self) -> None:
        self.become("refuse")
        time.sleep(0.05)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "refuse":
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            sides = [
                asyncio.create_task(self._pass(reader, far_writer, False)),
                asyncio.create_task(self._pass(far_reader, writer, True)),
            ]
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in sides:
                side.cancel()
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort() if self.mode == "refuse" else one.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                if self.mode == "delay":
                    await asyncio.sleep(self.delay)
                while self.mode == "silent":
                    await asyncio.sleep(0.02)
                if self.mode == "cut" and answer and len(data) > 1:
                    self.mode, self.cuts = "open", self.cuts + 1
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                writer.write(data)
                await writer.drain()
