// BatchNorm with an addition and ReLU, a channel at a time: the passes after the first find the channel in the cache.

namespace {

struct Two {
  double a, b;
};

// The sums of both results of f(offset) over a channel.
template <class F>
inline Two sums(const Planes& s, int64_t channel, const F& f) {
  Two out{0, 0};
  for (int64_t b = 0; b < s.blocks; ++b)
    for (int half = 0; half < kSamples; half += kLanes) {
      const vec real = s.real(b, half);
      vec even[2] = {}, odd[2] = {};
      for (int64_t y = 0; y < s.h; ++y) {
        const int64_t at = b * s.block() + channel * s.plane() + s.inside() + y * s.row() + half;
        int64_t x = 0;
        for (; x + 1 < s.w; x += 2) {
          f(at + x * kSamples, even[0], even[1]);
          f(at + (x + 1) * kSamples, odd[0], odd[1]);
        }
        if (x < s.w) f(at + x * kSamples, even[0], even[1]);
      }
      out.a += total((even[0] + odd[0]) * real);
      out.b += total((even[1] + odd[1]) * real);
    }
  return out;
}

inline vec positive(vec x) { return x > 0.f ? x : vec{}; }

}  // namespace

// y = relu(gamma * (x - mean) / deviation + beta + add). In training, mean and variance (without Bessel's correction)
// are the batch's and are written to `mean` and `variance`; otherwise they are read. add may be null.
API void flashfl_norm(const Planes* planes, const float* x, const float* gamma, const float* beta, const float* add,
                      int relu, int training, float epsilon, float* mean, float* variance, float* y) {
  const Planes& s = *planes;
  const double n = static_cast<double>(s.samples) * s.h * s.w;
  parallel(s.planes, s.threads, [&](int64_t c) {
    if (training) {
      const float m = static_cast<float>(
          sums(s, c, [&](int64_t at, vec& a, vec&) { a += load(x + at); }).a / n);
      const vec middle = all(m);
      const Two square = sums(s, c, [&](int64_t at, vec& a, vec& b) {
        const vec d = load(x + at) - middle;
        a += d * d, b += d;
      });
      const double shift = square.b / n;  // what single precision lost of the mean
      mean[c] = static_cast<float>(m + shift);
      variance[c] = static_cast<float>(std::max(0.0, square.a / n - shift * shift));
    }
    const float factor = gamma[c] / std::sqrt(variance[c] + epsilon);
    const vec scale = all(factor), offset = all(beta[c] - mean[c] * factor);
    if (add)
      each(s, c, [&](int64_t at, vec real) {
        const vec v = load(x + at) * scale + offset + load(add + at);
        store(y + at, (relu ? positive(v) : v) * real);
      });
    else
      each(s, c, [&](int64_t at, vec real) {
        const vec v = load(x + at) * scale + offset;
        store(y + at, (relu ? positive(v) : v) * real);
      });
    for (int64_t b = 0; b < s.blocks; ++b) clear_border(y + b * s.block() + c * s.plane(), s.h, s.w, s.pad);
  });
}

// Gradients of the above. y: its result if ReLU was applied, else null. dadd: the gradient of `add`, where ReLU was
// applied and there was one, else null.
API void flashfl_norm_gradient(const Planes* planes, const float* dy, const float* x, const float* y, const float* gamma,
                               const float* mean, const float* variance, int training, float epsilon, float* dx,
                               float* dgamma, float* dbeta, float* dadd) {
  const Planes& s = *planes;
  const double n = static_cast<double>(s.samples) * s.h * s.w;
  auto gradient = [&](int64_t at) {
    const vec g = load(dy + at);
    return y ? (load(y + at) > 0.f ? g : vec{}) : g;
  };
  parallel(s.planes, s.threads, [&](int64_t c) {
    const float inverse = 1.f / std::sqrt(variance[c] + epsilon);
    const vec middle = all(mean[c]);
    const Two sum = sums(s, c, [&](int64_t at, vec& a, vec& b) {
      const vec g = gradient(at);
      a += g, b += g * (load(x + at) - middle);
    });
    dbeta[c] = static_cast<float>(sum.a);
    dgamma[c] = static_cast<float>(sum.b * inverse);
    const vec scale = all(gamma[c] * inverse);
    const vec constant = all(training ? static_cast<float>(sum.a / n) : 0.f);
    const vec slope = all(training ? static_cast<float>(sum.b / n * inverse * inverse) : 0.f);
    each(s, c, [&](int64_t at, vec real) {
      const vec g = gradient(at);
      if (dadd) store(dadd + at, g * real);
      store(dx + at, scale * (g - constant - slope * (load(x + at) - middle)) * real);
    });
    for (int64_t b = 0; b < s.blocks; ++b) {
      const int64_t at = b * s.block() + c * s.plane();
      clear_border(dx + at, s.h, s.w, s.pad);
      if (dadd) clear_border(dadd + at, s.h, s.w, s.pad);
    }
  });
}
