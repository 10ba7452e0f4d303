"""What a report explains, in every format alike; Markdown's ** marks a term."""

BUBBLE_TEXT = """\
All three are idle time over makespan, for K stages. **measured**: of the steps as they really ran.
**replayed**: the same schedule played with the measured cost of every action and transfer, each stage on a device of
its own; it means something even where stages outnumber cores. **bound**: the closed form of the schedule for equal
stages and free transfers, (K-1)/(M+K-1) for GPipe and 1F1B; none is known for rows read from a file, and for some
schedules with recompute. So replayed - bound is imbalance and transfer (less a little, since the optimizer counts as
work), and measured - replayed is overhead and contention.
(Megatron-LM prints (K-1)/M instead, which is idle over ideal time.)"""

LEDGER_TEXT = """\
What the median step's time went to, in ms; the parts add up to the step. Each is the difference of two replays of the
point's own rows, one effect switched on after the other in the order of the columns: forwards and backwards spread
evenly over the ranks; what the schedule idles with equal stages; recompute; stages of unequal cost; transfers; the
optimizer; actions of one kind that do not all take the same time; and the rest, what happens between actions and
while ranks wait for a core."""

ADVICE_TEXT = """\
In words, and the one change from which most is to be gained: by the simulator, with the point's own costs (more
micro-batches are taken to cost as much per sample as these do, and overhead is left as it is), or, where that gains
more, as another point of this sweep has shown."""

SPEEDUP_TEXT = """\
A speed-up is the step time of the same model and batch on one device (K=1, M=1), with as many threads as one of the
point's stages has, over the point's."""

ENGINES_TEXT = """\
The same model, data, weights, optimizer and timer on other engines. Each step time stands over that of the built-in
engine's point named under **against**: the same schedule and cut, and for an engine that runs no pipeline GPipe, or
the best where there is none. Both were measured in the same rounds, so each round has a ratio of its own; shown is
their median, with a 95 % bootstrap interval. **slower** and **faster** mean that the interval excludes 1 and the ratio
exceeds the noise floor; **same**, that it does not; **undecided**, that there is too much scatter to say. Memory is
the exact peak of one rank, and of all ranks together; sent are the tensors that all ranks together hand to others in
one step. A dash: the engine cannot tell, or the point has no result."""

STAGES_TEXT = "Times of one action, and of all actions in a step (busy), in ms; memory at each rank's peak, in MiB."
