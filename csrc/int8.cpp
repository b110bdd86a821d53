// Eight-bit integers: shardlab/codecs/kernels/integers.py.
#include "integers.h"

using Int8 = Integers<LargestOver<127>, 8, false>;
using Int8Stochastic = Integers<LargestOver<127>, 8, true>;

SHARDLAB_GROUPED(int8, Int8)
SHARDLAB_GROUPED(int8_stochastic, Int8Stochastic)
