// Maxima over windows. The gradient goes to the first maximum of a window, as in torch.

namespace {

struct Window {  // the same fields in the same order as in library.py
  int64_t kh, kw, sh, sw, ph, pw;
};

// Call f(offset of the input pixel) for the pixels of the window of output pixel (y, x), from top left.
template <class F>
inline void each_in_window(const Planes& s, const Window& k, int64_t y, int64_t x, const F& f) {
  const int64_t top = y * k.sh - k.ph, left = x * k.sw - k.pw;
  const int64_t bottom = std::min(s.h, top + k.kh), right = std::min(s.w, left + k.kw);
  for (int64_t row = std::max<int64_t>(0, top); row < bottom; ++row)
    for (int64_t column = std::max<int64_t>(0, left); column < right; ++column)
      f(s.inside() + row * s.row() + column * kSamples);
}

}  // namespace

API void flashfl_pool(const Planes* in, const Planes* out, const Window* window, const float* x, float* y) {
  parallel(in->blocks * in->planes, in->threads, [&](int64_t p) {
    const float* from = x + p * in->plane();
    float* to = y + p * out->plane();
    for (int64_t row = 0; row < out->h; ++row)
      for (int64_t column = 0; column < out->w; ++column)
        for (int half = 0; half < kSamples; half += kLanes) {
          vec best = all(-INFINITY);
          each_in_window(*in, *window, row, column, [&](int64_t at) {
            const vec v = load(from + at + half);
            best = v > best ? v : best;
          });
          store(to + out->inside() + row * out->row() + column * kSamples + half, best);
        }
    clear_border(to, out->h, out->w, out->pad);
  });
}

API void flashfl_pool_gradient(const Planes* in, const Planes* out, const Window* window, const float* x, const float* y,
                               const float* dy, float* dx) {
  parallel(in->blocks * in->planes, in->threads, [&](int64_t p) {
    const float* from = x + p * in->plane();
    float* to = dx + p * in->plane();
    std::fill_n(to, in->plane(), 0.f);
    for (int64_t row = 0; row < out->h; ++row)
      for (int64_t column = 0; column < out->w; ++column)
        for (int half = 0; half < kSamples; half += kLanes) {
          const int64_t at = p * out->plane() + out->inside() + row * out->row() + column * kSamples + half;
          const vec best = load(y + at);
          vec left = load(dy + at);  // of the gradient: 0 once it has been given
          each_in_window(*in, *window, row, column, [&](int64_t pixel) {
            float* target = to + pixel + half;
            const ivec here = load(from + pixel + half) == best;
            store(target, load(target) + (here ? left : vec{}));
            left = here ? vec{} : left;
          });
        }
  });
}
