// The layout of batches, the lists of active weights, and how they are made.
//
// Layout. A batch of images is [blocks][planes][rows][columns][16 samples]. Rows and columns have a border of `pad` zeros
// on each side. So one active weight is a broadcast scalar times whole vectors of samples, and no tap leaves its plane.
// A linear layer is a 1x1 convolution of planes of one pixel.
//
// Lists. An output plane has the list of its active weights: for each, the distance (in floats) from an output pixel's
// origin to the input it multiplies. Layers with many active weights use lists for `members` = 4 planes at once: an
// entry then has 4 weights, some of them perhaps zero. `slot` says where each active weight lies among the entries.
//
// This file is compiled once for each instruction set. Every result is the same for any number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSamples = 16;  // in a block
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTile = 16, kWide = 6;  // floats in a vector; pixels of a tile, for one plane and for several
#elif defined(__AVX__)
constexpr int kLanes = 8, kTile = 10, kWide = 2;
#else
constexpr int kLanes = 4, kTile = 10, kWide = 2;
#endif
constexpr int kMembers = 4;
constexpr int64_t kCache = 384 * 1024;  // bytes of input that a band of rows may touch: they should stay in the L2 cache

typedef float vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline vec all(float x) { return x - vec{}; }
inline float total(vec v) {
  float half[kLanes];
  store(half, v);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) half[i] += half[i + width];
  return half[0];
}

struct Conv {  // the same fields in the same order as in library.py
  int64_t blocks, in, out, h, w, oh, ow, in_pad, out_pad, kh, kw, sh, sw, ph, pw, dh, dw, groups, members, threads;

  int64_t in_row() const { return (w + 2 * in_pad) * kSamples; }
  int64_t in_plane() const { return (h + 2 * in_pad) * in_row(); }
  int64_t out_row() const { return (ow + 2 * out_pad) * kSamples; }
  int64_t out_plane() const { return (oh + 2 * out_pad) * out_row(); }
  int64_t taps() const { return kh * kw; }
  int64_t phases() const { return sh * sw; }
};

// ---- Lists ----------------------------------------------------------------------------------------------------------

// Merge the rows of each group of `members` into one list. Row r has the weights order[start[r]..start[r + 1]), whose
// keys ascend. Returns the number of entries.
template <class Key, class Offset>
int64_t merge(int64_t rows, int64_t per_group, int64_t members, const std::vector<int64_t>& start,
              const std::vector<int32_t>& order, const Key& key, const Offset& offset, int32_t* ptr, int32_t* off,
              int32_t* slot) {
  int64_t entries = 0, block = 0;
  ptr[0] = 0;
  for (int64_t group = 0; group < rows; group += per_group) {
    for (int64_t first = group; first < group + per_group; first += members) {
      const int64_t count = std::min(members, group + per_group - first);
      int64_t at[kMembers];
      for (int64_t m = 0; m < count; ++m) at[m] = start[first + m];
      for (;;) {
        int64_t least = INT64_MAX;
        for (int64_t m = 0; m < count; ++m)
          if (at[m] < start[first + m + 1]) least = std::min(least, key(order[at[m]]));
        if (least == INT64_MAX) break;
        for (int64_t m = 0; m < count; ++m)
          if (at[m] < start[first + m + 1] && key(order[at[m]]) == least) {
            off[entries] = static_cast<int32_t>(offset(order[at[m]]));
            slot[order[at[m]++]] = static_cast<int32_t>(entries * members + m);
          }
        ++entries;
      }
      ptr[++block] = static_cast<int32_t>(entries);
    }
  }
  return entries;
}

struct Place {  // of a weight: output plane, input plane, tap
  int64_t o, i, y, x;
};

inline Place place(const Conv& c, int64_t at) {
  const int64_t inner = c.in / c.groups * c.taps(), o = at / inner, rest = at % inner;
  const int64_t i = rest / c.taps() + o / (c.out / c.groups) * (c.in / c.groups);
  return {o, i, rest % c.taps() / c.kw, rest % c.kw};
}

inline int64_t phase_of(int64_t tap, int64_t step, int64_t pad) { return ((tap - pad) % step + step) % step; }

}  // namespace

// The list of the forward pass. ptr: one more than groups of planes; off, slot: as many as weights. Returns entries.
API int64_t flashfl_plan(const Conv* conv, const int64_t* places, int64_t n, int32_t* ptr, int32_t* off, int32_t* slot) {
  const Conv& c = *conv;
  const int64_t inner = c.in / c.groups * c.taps();
  std::vector<int64_t> start(c.out + 1, n);
  std::vector<int32_t> order(n);
  int64_t at = 0;
  for (int64_t o = 0; o < c.out; ++o) {
    while (at < n && places[at] < o * inner) ++at;
    start[o] = at;
  }
  for (int64_t e = 0; e < n; ++e) order[e] = static_cast<int32_t>(e);
  auto offset = [&](int64_t e) {
    const Place p = place(c, places[e]);
    return p.i * c.in_plane() + p.y * c.dh * c.in_row() + p.x * c.dw * kSamples;
  };
  return merge(c.out, c.out, c.members, start, order, [&](int64_t e) { return places[e] % inner; }, offset, ptr, off,
               slot);
}

// The lists of the input gradient, one for each phase of the stride. ptr: one more than phases times groups of planes.
API int64_t flashfl_plan_input(const Conv* conv, const int64_t* places, int64_t n, int32_t* ptr, int32_t* off,
                               int32_t* slot) {
  const Conv& c = *conv;
  const int64_t rows = c.phases() * c.in;
  auto row_of = [&](const Place& p) {
    return (phase_of(p.y * c.dh, c.sh, c.ph) * c.sw + phase_of(p.x * c.dw, c.sw, c.pw)) * c.in + p.i;
  };
  std::vector<int64_t> start(rows + 1, 0);
  std::vector<int32_t> order(n);
  for (int64_t e = 0; e < n; ++e) ++start[row_of(place(c, places[e])) + 1];
  for (int64_t r = 0; r < rows; ++r) start[r + 1] += start[r];
  std::vector<int64_t> at(start.begin(), start.end() - 1);
  for (int64_t e = 0; e < n; ++e) order[at[row_of(place(c, places[e]))]++] = static_cast<int32_t>(e);
  auto key = [&](int64_t e) {
    const Place p = place(c, places[e]);
    return p.o * c.taps() + p.y * c.kw + p.x;
  };
  auto offset = [&](int64_t e) {
    const Place p = place(c, places[e]);
    const int64_t y = (phase_of(p.y * c.dh, c.sh, c.ph) + c.ph - p.y * c.dh) / c.sh;
    const int64_t x = (phase_of(p.x * c.dw, c.sw, c.pw) + c.pw - p.x * c.dw) / c.sw;
    return p.o * c.out_plane() + y * c.out_row() + x * kSamples;
  };
  return merge(rows, c.in, c.members, start, order, key, offset, ptr, off, slot);
}
