"""1F1B, and the interleaved schedule with `overlap_p2p_comm`, as Megatron's code has them: what
each stage posts, waits for and runs, in order. A wait ends when both sides have posted the message.

Source: `forward_backward_pipelining_with_interleaving`, `..._without_interleaving` in
`schedules.py`, and `_p2p_ops`.
"""

from collections import Counter

OTHER = {
    "send_next": ("recv_prev", 1),
    "recv_prev": ("send_next", -1),
    "send_prev": ("recv_next", -1),
    "recv_next": ("send_prev", 1),
}
"""What the neighbour, so many stages further, posts for the same message."""


class Program:
    """Of one stage: `("run", direction, chunk)`, `("post", what)`, `("wait", what, number)`."""

    def __init__(self, stage, p, v, m):
        self.stage, self.p, self.v = stage, p, v
        self.chunks = [c for _ in range(0, m, p) for c in range(v) for _ in range(p)]
        self.lines, self.posted = [], Counter()
        self.sent = {"send_next": [], "send_prev": []}
        self.received = {"recv_prev": [], "recv_next": []}
        if v > 1:
            self._write(len(self.chunks))
        else:
            self._write_one_chunk(m)

    def chunk(self, k, forward):
        own = self.chunks[k % len(self.chunks)]
        return own if forward else self.v - 1 - own

    def _receives(self, k, forward):
        """`recv_tensor_from_previous_stage`"""
        if self.stage != (0 if forward else self.p - 1):
            return True
        last = self.v - 1 if forward else 0
        return k >= self.p - 1 and self.chunk(k - (self.p - 1), forward) != last

    def _sends(self, k, forward):
        ends = (self.p - 1, self.v - 1) if forward else (0, 0)
        return (self.stage, self.chunk(k, forward)) != ends

    def _post(self, **what):
        names = [name for name, wanted in what.items() if wanted]
        for name in names:
            self.lines.append(("post", name))
            self.posted[name] += 1
        return [(name, self.posted[name] - 1) for name in names]

    def _wait(self, requests):
        self.lines += [("wait", *request) for request in requests]

    def _run(self, k, forward):
        if not forward and self.received["recv_next"] and self._needs_gradient(k):
            self.lines.append(("begin early", k))
            self._wait(self.received["recv_next"][:1])
            del self.received["recv_next"][:1]
        self.lines.append(("run", "forward" if forward else "backward", self.chunk(k, forward)))

    def _needs_gradient(self, k):
        return (self.stage, self.chunk(k, False)) != (self.p - 1, self.v - 1)

    def _both(self, k, forward, receives):
        """With `overlap_p2p_comm`: waits for what it sent the time before."""
        send, receive = ("send_next", "recv_prev") if forward else ("send_prev", "recv_next")
        found = self._post(**{send: self._sends(k, forward), receive: receives})
        self._wait(self.sent[send])
        self.sent[send] = [each for each in found if each[0] == send]
        self.received[receive] += [each for each in found if each[0] == receive]

    def _write(self, total):
        warmup = min((self.p - 1 - self.stage) * 2 + (self.v - 1) * self.p, total)
        if self.stage:
            self._wait(self._post(recv_prev=True))
        for k in range(warmup):
            self._run(k, True)
            receives = self._receives(k, True) and k != total - 1
            self._wait(self._post(send_next=self._sends(k, True), recv_prev=receives))
        if warmup < total and self.stage < self.p - 1:
            self.received["recv_next"] += self._post(recv_next=True)
        for k in range(total - warmup):
            if (self.stage, self.chunk(k + warmup, True)) != (0, 0):
                self._wait(self.received["recv_prev"][:1])
                del self.received["recv_prev"][:1]
            self._run(k + warmup, True)
            is_last = k == total - warmup - 1
            self._both(k + warmup, True, self._receives(k + warmup, True) and not is_last)
            self._run(k, False)
            self._both(k, False, self._receives(k, False))
        if warmup == total and self.stage < self.p - 1:
            self._cool(self._post(recv_next=True), 0)
        for k in range(total - warmup, total):
            self._run(k, False)
            receives = self._receives(k, False) and k != total - 1
            self._cool(self._post(send_prev=self._sends(k, False), recv_next=receives), k + 1)

    def _write_one_chunk(self, m):
        first, last = self.stage == 0, self.stage == self.p - 1
        warmup = min(self.p - 1 - self.stage, m)
        for k in range(warmup):
            self._wait(self._post(recv_prev=not first))
            self._run(k, True)
            self._wait(self._post(send_next=not last))
        self._wait(self._post(recv_prev=not first and warmup < m))
        for k in range(m - warmup):
            self._run(k + warmup, True)
            self._cool(self._post(send_next=not last, recv_next=not last), k)
            self._run(k, False)
            receives = not first and k != m - warmup - 1
            self._wait(self._post(send_prev=not first, recv_prev=receives))
        for k in range(m - warmup, m):
            self._cool(self._post(recv_next=True), k)
            self._run(k, False)
            self._wait(self._post(send_prev=not first))

    def _cool(self, requests, following):
        """Without overlap: what was posted is waited for at once."""
        if any(name == "recv_next" for name, _ in requests):
            self.lines.append(("begin early", following))
        self._wait(requests)


def ends(p, v, m, forward, backward, ahead):
    """When each stage ends; times by `[stage][chunk]`."""
    programs = [Program(stage, p, v, m) for stage in range(p)]
    now, at, posted, moved = [0] * p, [0] * p, {}, True
    begun, ran = [{} for _ in range(p)], [0] * p
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program.lines):
                what, *of = program.lines[at[stage]]
                if what == "post":
                    posted.setdefault((stage, *of), []).append(now[stage])
                elif what == "wait":
                    name, number = of
                    other, way = OTHER[name]
                    there = posted.get(((stage + way) % p, other), [])
                    if number >= len(there):
                        break
                    now[stage] = max(now[stage], there[number])
                elif what == "begin early":
                    early = ahead[stage][program.chunk(of[0], False)]
                    now[stage] += early
                    begun[stage][of[0]] = early
                elif of[0] == "forward":
                    now[stage] += forward[stage][of[1]]
                else:
                    now[stage] += backward[stage][of[1]] - begun[stage].pop(ran[stage], 0)
                    ran[stage] += 1
                at[stage], moved = at[stage] + 1, True
    assert all(done == len(each.lines) for done, each in zip(at, programs, strict=True))
    return now
