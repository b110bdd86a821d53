// Stochastic levels of the norm of a group: shardlab/codecs/kernels/integers.py.
#include "integers.h"

using Qsgd1 = Integers<NormOver<1>, 2, true>;
using Qsgd7 = Integers<NormOver<7>, 4, true>;
using Qsgd127 = Integers<NormOver<127>, 8, true>;

SHARDLAB_GROUPED(qsgd1, Qsgd1)
SHARDLAB_GROUPED(qsgd7, Qsgd7)
SHARDLAB_GROUPED(qsgd127, Qsgd127)
