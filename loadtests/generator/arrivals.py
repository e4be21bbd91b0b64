"""When the requests of an open loop are due: a Poisson process, from a seed.

Given their number, the arrivals of a Poisson process are uniform over the interval. For a changing rate, each arrival
of a process at the peak rate is kept with a probability of the rate at that time over the peak (Lewis and Shedler
1979).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadtests.generator.load_profile import Profile


def arrivals(
    rate_per_s: float, seconds: float, seed: Sequence[int], profile: Profile, warm_up_s: float = 0.0
) -> NDArray[np.float64]:
    """Return the moments in seconds from the start, sorted, at a rate of `rate_per_s` times what the profile says.

    The profile is that of the `seconds` after the warm-up, which has its first share.
    """
    whole_s = warm_up_s + seconds
    random = np.random.default_rng(list(seed))
    moments = np.sort(random.uniform(0, whole_s, random.poisson(rate_per_s * whole_s)))
    shares = np.asarray([profile(max(0.0, moment - warm_up_s) / seconds) for moment in moments])
    return moments[random.uniform(0, 1, len(moments)) < shares]
