// Sparse convolutions: forward, and gradients of the input and of the active weights. lists.h explains the layout.
#include "lists.h"

namespace {

// ---- Gathering: every output pixel is a sum over a list -------------------------------------------------------------

struct Gather {
  const float* in;
  float* out;
  int64_t in_block, in_row, in_pixel, out_block, out_row, out_pixel, out_plane;  // strides, in floats
  int64_t blocks, rows, columns, planes, in_planes;
  const int32_t *ptr, *off;
  const float *weights, *bias;
};

// M planes, R rows of C pixels. Pixels of the input are S floats apart (0: as the argument says).
template <int M, int R, int C, int S>
void gather_tile(const float* const* in, int64_t in_pixel, const int32_t* off, const float* weights, int64_t n,
                 const float* bias, float* const* out, int64_t out_pixel, int64_t out_plane, int64_t members) {
  const int64_t step = S ? S : in_pixel;
  for (int half = 0; half < kSamples; half += kLanes) {
    vec sum[M][R][C];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[m][r][c] = all(bias[m]);
    const float* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) rows[r] = in[r] + half;
    for (int64_t e = 0; e < n; ++e) {
      const int64_t at = off[e];
      vec w[M];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) w[m] = all(weights[e * M + m]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
          const vec x = load(rows[r] + at + c * step);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) sum[m][r][c] += w[m] * x;
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      if (m < members)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c) store(out[r] + half + m * out_plane + c * out_pixel, sum[m][r][c]);
  }
}

using TileFunction = void (*)(const float* const*, int64_t, const int32_t*, const float*, int64_t, const float*,
                              float* const*, int64_t, int64_t, int64_t);

template <int M, int R, int S, int C>
TileFunction tile_function(int columns) {
  if constexpr (C == 0) {
    return nullptr;
  } else {
    return columns == C ? gather_tile<M, R, C, S> : tile_function<M, R, S, C - 1>(columns);
  }
}

template <int M, int R, int S>
TileFunction tile_of(int columns) {
  return tile_function<M, R, S, (M == 1 ? kTile : kWide) / R>(columns);
}

template <int M, int R>
TileFunction tile_of_step(int columns, int64_t step) {
  return step == kSamples ? tile_of<M, R, kSamples>(columns)
         : step == 2 * kSamples ? tile_of<M, R, 2 * kSamples>(columns)
                                : tile_of<M, R, 0>(columns);
}

template <int M>
TileFunction find_tile(int rows, int columns, int64_t step) {
  return rows == 4   ? tile_of_step<M, 4>(columns, step)
         : rows == 2 ? tile_of_step<M, 2>(columns, step)
                     : tile_of_step<M, 1>(columns, step);
}

// How `columns` pixels are cut into tiles of at most `most`, as evenly as possible, and how many rows a tile takes.
struct Cut {
  int64_t tiles, base, longer, rows;
  Cut(int64_t columns, int64_t all_rows, int64_t most)
      : tiles((columns + most - 1) / most), base(columns / tiles), longer(columns % tiles), rows(1) {
    for (int64_t r = 2; r <= 4; r *= 2)
      if (r * columns <= most && r <= all_rows) rows = r;
  }
  int64_t first(int64_t t) const { return t * base + std::min(t, longer); }
  int64_t width(int64_t t) const { return base + (t < longer); }
};

template <int M>
void gather(const Gather& g, int64_t threads) {
  const int64_t all_rows = g.blocks * g.rows, groups = (g.planes + M - 1) / M;
  if (!all_rows || !g.columns || !groups) return;
  const Cut cut(g.columns, all_rows, M == 1 ? kTile : kWide);
  const int64_t row_bytes = std::max<int64_t>(1, g.in_planes * g.in_row * 4);
  const int64_t fit = std::max<int64_t>(cut.rows, kCache / row_bytes / cut.rows * cut.rows);
  const int64_t band = std::min(fit, (all_rows + cut.rows - 1) / cut.rows * cut.rows);
  const int64_t bands = (all_rows + band - 1) / band;
  const int64_t parts = bands >= 2 * threads ? 1 : std::min(groups, threads * 2);  // of the output planes
  TileFunction functions[2][3];  // by width of the tile (base, longer) and rows (1, 2, 4)
  for (int wide = 0; wide < 2; ++wide)
    for (int r = 0; r < 3; ++r)
      functions[wide][r] = find_tile<M>(1 << r, static_cast<int>(cut.base + wide), g.in_pixel);

  parallel(bands * parts, threads, [&](int64_t task) {
    const int64_t first_row = task / parts * band, end_row = std::min(all_rows, first_row + band);
    const int64_t part = task % parts, first = groups * part / parts, end = groups * (part + 1) / parts;
    for (int64_t p = first; p < end; ++p) {
      float bias[M];
      const int64_t members = std::min<int64_t>(M, g.planes - p * M);
      for (int m = 0; m < M; ++m) bias[m] = g.bias && m < members ? g.bias[p * M + m] : 0.f;
      const int64_t from = g.ptr[p], n = g.ptr[p + 1] - from;
      for (int64_t row = first_row; row < end_row;) {
        int64_t rows = cut.rows;
        while (row + rows > end_row) rows /= 2;
        for (int64_t t = 0; t < cut.tiles; ++t) {
          const float* in[4];
          float* out[4];
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t block = (row + r) / g.rows, y = (row + r) % g.rows, x = cut.first(t);
            in[r] = g.in + block * g.in_block + y * g.in_row + x * g.in_pixel;
            out[r] = g.out + block * g.out_block + p * M * g.out_plane + y * g.out_row + x * g.out_pixel;
          }
          functions[t < cut.longer][rows / 2](in, g.in_pixel, g.off + from, g.weights + from * M, n, bias, out,
                                              g.out_pixel, g.out_plane, members);
        }
        row += rows;
      }
    }
  });
}

// ---- Gradients of the active weights --------------------------------------------------------------------------------

struct Dots {  // entry e of plane p: the sum over all pixels of input[off[e] + pixel] * gradient[p][pixel]
  const float *in, *grad;
  int64_t in_block, in_row, in_pixel, grad_block, grad_row, grad_plane, blocks, rows, columns, planes, in_planes;
  const int32_t *ptr, *off;
  float* out;  // [halves][entries][members]

  // The halves of the batch are added up apart, also on one thread: two threads then read different samples, and the
  // result does not depend on how many there are.
  int64_t halves() const { return std::min<int64_t>(2, blocks); }
  int64_t first_row(int64_t half) const { return blocks * half / halves() * rows; }
};

template <int R, int C, int S>
void dots_tile(const float* const* in, int64_t in_pixel, const int32_t* off, int64_t n, const float* const* grad,
               float* sums) {
  const int64_t step = S ? S : in_pixel;
  for (int half = 0; half < kSamples; half += kLanes) {
    vec g[R][C];
    const float* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      rows[r] = in[r] + half;
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) g[r][c] = load(grad[r] + half + c * kSamples);
    }
    for (int64_t e = 0; e < n; ++e) {
      const int64_t at = off[e];
      vec part[4] = {load(sums + e * kLanes), vec{}, vec{}, vec{}};
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) part[(r * C + c) % 4] += g[r][c] * load(rows[r] + at + c * step);
      store(sums + e * kLanes, (part[0] + part[1]) + (part[2] + part[3]));
    }
  }
}

using DotsFunction = void (*)(const float* const*, int64_t, const int32_t*, int64_t, const float* const*, float*);

template <int R, int S, int C>
DotsFunction dots_function(int columns) {
  if constexpr (C == 0) {
    return nullptr;
  } else {
    return columns == C ? dots_tile<R, C, S> : dots_function<R, S, C - 1>(columns);
  }
}

template <int R>
DotsFunction dots_of_step(int columns, int64_t step) {
  return step == kSamples ? dots_function<R, kSamples, kTile / R>(columns)
         : step == 2 * kSamples ? dots_function<R, 2 * kSamples, kTile / R>(columns)
                                : dots_function<R, 0, kTile / R>(columns);
}

inline int64_t band_rows(const Dots& d, int64_t least) {
  const int64_t fit = kCache / std::max<int64_t>(1, d.in_planes * d.in_row * 4);
  return std::max<int64_t>(least, fit / least * least);
}

void dots_single(const Dots& d, int64_t threads) {
  const int64_t all_rows = d.blocks * d.rows;
  const Cut cut(d.columns, all_rows, kTile);
  DotsFunction functions[2][3];
  for (int wide = 0; wide < 2; ++wide) {
    const int columns = static_cast<int>(cut.base + wide);
    functions[wide][0] = dots_of_step<1>(columns, d.in_pixel);
    functions[wide][1] = dots_of_step<2>(columns, d.in_pixel);
    functions[wide][2] = dots_of_step<4>(columns, d.in_pixel);
  }
  int64_t longest = 0;
  for (int64_t p = 0; p < d.planes; ++p) longest = std::max<int64_t>(longest, d.ptr[p + 1] - d.ptr[p]);
  const int64_t band = band_rows(d, cut.rows), parts = std::min(d.planes, threads > 1 ? threads * 4 : 1);
  parallel(d.halves() * parts, threads, [&](int64_t task) {
    const int64_t half = task / parts, part = task % parts, last_row = d.first_row(half + 1);
    float* out = d.out + half * d.ptr[d.planes];
    std::vector<float> sums(longest * kLanes);
    for (int64_t first_row = d.first_row(half); first_row < last_row; first_row += band) {
      const int64_t end_row = std::min(last_row, first_row + band);
      for (int64_t p = d.planes * part / parts; p < d.planes * (part + 1) / parts; ++p) {
        const int64_t from = d.ptr[p], n = d.ptr[p + 1] - from;
        std::fill_n(sums.data(), n * kLanes, 0.f);
        for (int64_t row = first_row; row < end_row;) {
          int64_t rows = cut.rows;
          while (row + rows > end_row) rows /= 2;
          for (int64_t t = 0; t < cut.tiles; ++t) {
            const float *in[4], *grad[4];
            for (int64_t r = 0; r < rows; ++r) {
              const int64_t block = (row + r) / d.rows, y = (row + r) % d.rows, x = cut.first(t);
              in[r] = d.in + block * d.in_block + y * d.in_row + x * d.in_pixel;
              grad[r] = d.grad + block * d.grad_block + p * d.grad_plane + y * d.grad_row + x * kSamples;
            }
            functions[t < cut.longer][rows / 2](in, d.in_pixel, d.off + from, n, grad, sums.data());
          }
          row += rows;
        }
        for (int64_t e = 0; e < n; ++e) out[from + e] += total(load(sums.data() + e * kLanes));
      }
    }
  });
}

constexpr int kEntries = kLanes == 16 ? 6 : 2;  // of a list that are summed together, times kMembers planes

template <int K>
void dots_wide(const Dots& d, int64_t p, int64_t from, int64_t first_row, int64_t end_row, float* out) {
  const int64_t members = std::min<int64_t>(kMembers, d.planes - p * kMembers);
  vec sum[K][kMembers] = {};
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t block = row / d.rows, y = row % d.rows;
    const float* in = d.in + block * d.in_block + y * d.in_row;
    const float* grad = d.grad + block * d.grad_block + p * kMembers * d.grad_plane + y * d.grad_row;
    const float *x[K], *g[kMembers];
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) x[k] = in + d.off[from + k];
#pragma GCC unroll 16
    for (int m = 0; m < kMembers; ++m) g[m] = grad + std::min<int64_t>(m, members - 1) * d.grad_plane;
    for (int64_t c = 0; c < d.columns; ++c)
      for (int half = 0; half < kSamples; half += kLanes) {
        vec gradient[kMembers];
#pragma GCC unroll 16
        for (int m = 0; m < kMembers; ++m) gradient[m] = load(g[m] + c * kSamples + half);
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
          const vec value = load(x[k] + c * d.in_pixel + half);
#pragma GCC unroll 16
          for (int m = 0; m < kMembers; ++m) sum[k][m] += gradient[m] * value;
        }
      }
  }
  for (int k = 0; k < K; ++k)
    for (int m = 0; m < members; ++m) out[(from + k) * kMembers + m] += total(sum[k][m]);
}

template <int K>
void dots_rest(int64_t count, const Dots& d, int64_t p, int64_t from, int64_t first_row, int64_t end_row, float* out) {
  if constexpr (K > 0) {
    if (count == K)
      dots_wide<K>(d, p, from, first_row, end_row, out);
    else
      dots_rest<K - 1>(count, d, p, from, first_row, end_row, out);
  }
}

void dots_several(const Dots& d, int64_t threads) {
  const int64_t groups = (d.planes + kMembers - 1) / kMembers, band = band_rows(d, 1);
  const int64_t parts = std::min(groups, threads > 1 ? threads * 4 : 1);
  parallel(d.halves() * parts, threads, [&](int64_t task) {
    const int64_t half = task / parts, part = task % parts, last_row = d.first_row(half + 1);
    float* out = d.out + half * d.ptr[groups] * kMembers;
    for (int64_t first_row = d.first_row(half); first_row < last_row; first_row += band)
      for (int64_t p = groups * part / parts; p < groups * (part + 1) / parts; ++p)
        for (int64_t from = d.ptr[p]; from < d.ptr[p + 1]; from += kEntries)
          dots_rest<kEntries>(std::min<int64_t>(kEntries, d.ptr[p + 1] - from), d, p, from, first_row,
                              std::min(last_row, first_row + band), out);
  });
}

// ---- Planes ---------------------------------------------------------------------------------------------------------

struct Planes {  // the same fields in the same order as in library.py
  int64_t blocks, planes, h, w, pad, samples, threads;

  int64_t row() const { return (w + 2 * pad) * kSamples; }
  int64_t plane() const { return (h + 2 * pad) * row(); }
  int64_t block() const { return planes * plane(); }
  int64_t inside() const { return pad * row() + pad * kSamples; }
  vec real(int64_t block, int half) const {  // 1 for samples, 0 for lanes that only fill the last block
    vec out;
    for (int i = 0; i < kLanes; ++i) out[i] = block * kSamples + half + i < samples;
    return out;
  }
};

void clear_border(float* plane, int64_t h, int64_t w, int64_t pad) {
  if (!pad) return;
  const int64_t row = (w + 2 * pad) * kSamples, side = pad * kSamples;
  std::fill_n(plane, pad * row, 0.f);
  std::fill_n(plane + (h + pad) * row, pad * row, 0.f);
  for (int64_t y = pad; y < h + pad; ++y) {
    std::fill_n(plane + y * row, side, 0.f);
    std::fill_n(plane + (y + 1) * row - side, side, 0.f);
  }
}

void clear_borders(float* data, int64_t count, int64_t h, int64_t w, int64_t pad, int64_t threads) {
  const int64_t plane = (h + 2 * pad) * (w + 2 * pad) * kSamples;
  if (pad) parallel(count, threads, [&](int64_t p) { clear_border(data + p * plane, h, w, pad); });
}

// Call f(offset of a pixel's samples, 1 for samples and 0 for lanes that only fill the last block) for a whole channel.
template <class F>
inline void each(const Planes& s, int64_t channel, const F& f) {
  for (int64_t b = 0; b < s.blocks; ++b)
    for (int half = 0; half < kSamples; half += kLanes) {
      const vec real = s.real(b, half);
      for (int64_t y = 0; y < s.h; ++y) {
        const int64_t at = b * s.block() + channel * s.plane() + s.inside() + y * s.row() + half;
        for (int64_t x = 0; x < s.w; ++x) f(at + x * kSamples, real);
      }
    }
}

}  // namespace

#include "norm.h"
#include "pool.h"

// ---- What Python calls ----------------------------------------------------------------------------------------------

// Weights as the lists want them: out[slot[e]] = values[e]. `out` has zeros elsewhere.
API void flashfl_pack(const float* values, const int32_t* slot, int64_t n, float* out) {
  for (int64_t e = 0; e < n; ++e) out[slot[e]] = values[e];
}

API void flashfl_forward(const Conv* conv, const int32_t* ptr, const int32_t* off, const float* weights,
                         const float* bias, const float* in, float* out) {
  const Conv& c = *conv;
  Gather g{};
  g.in = in + (c.in_pad - c.ph) * c.in_row() + (c.in_pad - c.pw) * kSamples;
  g.out = out + c.out_pad * c.out_row() + c.out_pad * kSamples;
  g.in_block = c.in * c.in_plane(), g.in_row = c.sh * c.in_row(), g.in_pixel = c.sw * kSamples;
  g.out_plane = c.out_plane(), g.out_block = c.out * c.out_plane(), g.out_row = c.out_row(), g.out_pixel = kSamples;
  g.blocks = c.blocks, g.rows = c.oh, g.columns = c.ow, g.planes = c.out, g.in_planes = c.in;
  g.ptr = ptr, g.off = off, g.weights = weights, g.bias = bias;
  c.members == 1 ? gather<1>(g, c.threads) : gather<kMembers>(g, c.threads);
  clear_borders(out, c.blocks * c.out, c.oh, c.ow, c.out_pad, c.threads);
}

API void flashfl_input_gradient(const Conv* conv, const int32_t* ptr, const int32_t* off, const float* weights,
                                const float* grad, float* out) {
  const Conv& c = *conv;
  const int64_t groups = (c.in + c.members - 1) / c.members;
  for (int64_t phase = 0; phase < c.phases(); ++phase) {
    const int64_t y = phase / c.sw, x = phase % c.sw;
    if (y >= c.h || x >= c.w) continue;
    Gather g{};
    g.in = grad + c.out_pad * c.out_row() + c.out_pad * kSamples;
    g.out = out + (c.in_pad + y) * c.in_row() + (c.in_pad + x) * kSamples;
    g.in_block = c.out * c.out_plane(), g.in_row = c.out_row(), g.in_pixel = kSamples;
    g.out_plane = c.in_plane(), g.out_block = c.in * c.in_plane();
    g.out_row = c.sh * c.in_row(), g.out_pixel = c.sw * kSamples;
    g.blocks = c.blocks, g.rows = (c.h - y + c.sh - 1) / c.sh, g.columns = (c.w - x + c.sw - 1) / c.sw;
    g.planes = c.in, g.in_planes = c.out;
    g.ptr = ptr + phase * groups, g.off = off, g.weights = weights;
    c.members == 1 ? gather<1>(g, c.threads) : gather<kMembers>(g, c.threads);
  }
  clear_borders(out, c.blocks * c.in, c.h, c.w, c.in_pad, c.threads);
}

API void flashfl_weight_gradient(const Conv* conv, const int32_t* ptr, const int32_t* off, const int32_t* slot,
                                 int64_t n, const float* in, const float* grad, float* out) {
  const Conv& c = *conv;
  const int64_t groups = (c.out + c.members - 1) / c.members;
  Dots d{};
  d.in = in + (c.in_pad - c.ph) * c.in_row() + (c.in_pad - c.pw) * kSamples;
  d.grad = grad + c.out_pad * c.out_row() + c.out_pad * kSamples;
  d.in_block = c.in * c.in_plane(), d.in_row = c.sh * c.in_row(), d.in_pixel = c.sw * kSamples;
  d.grad_block = c.out * c.out_plane(), d.grad_row = c.out_row(), d.grad_plane = c.out_plane();
  d.blocks = c.blocks, d.rows = c.oh, d.columns = c.ow, d.planes = c.out, d.in_planes = c.in;
  const int64_t entries = ptr[groups] * c.members;
  std::vector<float> sums(static_cast<size_t>(d.halves() * entries), 0.f);
  d.ptr = ptr, d.off = off, d.out = sums.data();
  if (n > 0 && d.blocks * d.rows * d.columns > 0) {
    c.members == 1 ? dots_single(d, c.threads) : dots_several(d, c.threads);
  }
  for (int64_t e = 0; e < n; ++e) {
    out[e] = 0.f;
    for (int64_t half = 0; half < d.halves(); ++half) out[e] += sums[half * entries + slot[e]];
  }
}
