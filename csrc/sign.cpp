// Signs with the mean magnitude of the message, of which the majority wins.
#include "signs.h"

static constexpr int64_t kMagnitude = 4;  // bytes of a payload before its bits
static constexpr int64_t kSigns = 512;    // elements whose bits lie together in planes
static constexpr int64_t kDigits = 32;    // binary digits of a number of payloads

// The bits of the elements from start to stop, and the sum of the magnitudes of every 512 elements.
SHARDLAB_KERNEL void sign_encode(const float* x, const float* residual, int64_t n, int64_t start,
                                 int64_t stop, double* sums, uint8_t* payload) {
  alignas(64) float wanted[kSigns];
  for (int64_t first = start; first < stop; first += kSigns) {
    const int64_t size = smaller(kSigns, n - first);
    const float* given = x + first;
    if (residual) {
      for (int64_t i = 0; i < size; ++i) wanted[i] = given[i] + residual[first + i];
      given = wanted;
    }
    sums[first / kSigns] = static_cast<double>(magnitude_sum(given, size));
    pack_signs(given, size, payload + kMagnitude + first / 8);
  }
}

// The mean magnitude of n elements from their sums, which are folded in place.
SHARDLAB_KERNEL void sign_magnitude(double* sums, int64_t n, uint8_t* payload) {
  int64_t count = (n + kSigns - 1) / kSigns;
  if (count == 0) sums[0] = 0.0;
  for (; count > 1; count = (count + 1) / 2)
    for (int64_t i = 0; i < count / 2; ++i) sums[i] += sums[i + (count + 1) / 2];
  const float mean = static_cast<float>(sums[0] / static_cast<double>(n ? n : 1));
  uint32_t bits = bits_of(mean);
  if (bits < 0x00800000u) bits = 0;           // subnormal
  if (!is_finite(bits)) bits = 0x7FC00000u;   // NaN
  store_word(payload, static_cast<uint16_t>(bits));
  store_word(payload + 2, static_cast<uint16_t>(bits >> 16));
}

// kept = x + residual - decoded, or residual where that is not finite. From the end to the start:
// what sign_encode read last may still be in a cache.
SHARDLAB_KERNEL void sign_keep(const float* x, const float* residual, float* kept, int64_t start,
                               int64_t stop, const uint8_t* payload) {
  const float magnitude = float_of(load_quad(payload));
  for (int64_t last = stop; last > start; last -= kSigns) {
    const int64_t first = last - kSigns > start ? last - kSigns : start;
    SHARDLAB_ELEMENTWISE
    for (int64_t i = first; i < last; ++i) {
      const float wanted = x[i] + residual[i];
      const float rest = wanted - (wanted < 0.0f ? -magnitude : magnitude);
      kept[i] = is_finite(bits_of(rest)) ? rest : residual[i];
    }
  }
}

// Where most votes are set, and where as many are set as not; a bit for each of 512 elements.
struct Outcome {
  alignas(64) uint8_t negative[kSigns / 8], tie[kSigns / 8];
};

// Numbers are written vertically: digit d of the number of set bits at one place, for all places.
SHARDLAB_INLINE void vote(const uint8_t* const* payloads, int64_t count, int64_t voters,
                          int64_t codes, int64_t width, Outcome& outcome) {
  alignas(64) uint8_t digits[kDigits][kSigns / 8];
  int64_t length = 0;
  for (int64_t p = 0, seen = 0; p < count; ++p) {
    if (load_quad(payloads[p]) == 0) continue;
    alignas(64) uint8_t carry[kSigns / 8] = {};
    for (int64_t j = 0; j < width; ++j) carry[j] = payloads[p][codes + j];
    if (++seen >> length)
      for (int64_t j = 0; j < kSigns / 8; ++j) digits[length][j] = 0;
    length += (seen >> length) != 0;
    for (int64_t d = 0; d < length; ++d)
      for (int64_t j = 0; j < kSigns / 8; ++j) {
        const uint8_t both = digits[d][j] & carry[j];
        digits[d][j] ^= carry[j];
        carry[j] = both;
      }
  }
  const int64_t half = voters / 2;
  for (int64_t j = 0; j < kSigns / 8; ++j) outcome.negative[j] = 0, outcome.tie[j] = 0xFF;
  for (int64_t d = length - 1; d >= 0; --d) {
    const uint8_t digit = half >> d & 1 ? 0xFF : 0;
    for (int64_t j = 0; j < kSigns / 8; ++j) {
      outcome.negative[j] |= outcome.tie[j] & digits[d][j] & static_cast<uint8_t>(~digit);
      outcome.tie[j] &= static_cast<uint8_t>(~(digits[d][j] ^ digit));
    }
  }
  if (voters % 2)
    for (int64_t j = 0; j < kSigns / 8; ++j) outcome.tie[j] = 0;
}

// out = alpha * (sum of the magnitudes) * (1, -1, or 0 for a tie); added to out if `add`.
SHARDLAB_KERNEL void sign_decode(const uint8_t* const* payloads, int64_t count, int64_t n,
                                 int64_t start, int64_t stop, float alpha, int add, float* out) {
  float total = 0.0f;
  int64_t voters = 0;
  for (int64_t p = 0; p < count; ++p) {
    total += float_of(load_quad(payloads[p]));
    voters += load_quad(payloads[p]) != 0;
  }
  const float scale = alpha * total, none = 0.0f * scale;
  Outcome outcome;
  alignas(64) float values[8][kSigns / 8];
  for (int64_t first = start; first < stop; first += kSigns) {
    const int64_t size = smaller(kSigns, n - first), width = (size + 7) / 8;
    ahead(out + first, size);
    vote(payloads, count, voters, kMagnitude + first / 8, width, outcome);
    for (int64_t j = 0; j < kSigns / 8; j += 8) {
      uint32_t negative[8], tie[8];
      spread(outcome.negative + j, negative);
      spread(outcome.tie + j, tie);
#pragma GCC unroll 8
      for (int64_t place = 0; place < 8; ++place)
        SHARDLAB_LANES
        for (int64_t l = 0; l < 8; ++l) {
          const float value = static_cast<int32_t>(negative[l] << (7 - place)) < 0 ? -scale : scale;
          values[place][j + l] = static_cast<int32_t>(tie[l] << (7 - place)) < 0 ? none : value;
        }
    }
    for (int64_t place = 0; place * width < size; ++place) {
      const int64_t length = smaller(width, size - place * width);
      float* __restrict to = out + first + place * width;
      if (add)
        for (int64_t i = 0; i < length; ++i) to[i] += values[place][i];
      else
        for (int64_t i = 0; i < length; ++i) to[i] = values[place][i];
    }
  }
}
