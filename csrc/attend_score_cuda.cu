/* attend whose last rows score the slots, on a GPU: the kernels of attend, then those of score in the same call. Logits
 * lie in registers: to write them all to memory and read them again would be more than to make them twice
 * (README.md). */
// budget: regs 32, smem 0 (registers of a thread, bytes of a block)
#include "launch.cuh"
#include "state.cuh"

/* least [n] = the smaller of len and span */
static __global__ void __launch_bounds__(256) span_kernel(const int32_t *len, int64_t n, int span, int32_t *least) {
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i < n) least[i] = min(len[i], span);
}

/* With a span: attend by the observing rows over the span, for their lse. */
struct Span {
  kv_attend attend;
  int32_t *len;
};

static Span span_of(const kv_attend_score *a, Cutter &scratch) {
  const int64_t R = a->score.rows.R, size = a->attend.dtype == KV_F32 ? 4 : 2;
  Span x = {a->attend, nullptr};
  x.attend.T = R;
  x.attend.q = static_cast<const char *>(x.attend.q) + (a->attend.T - R) * x.attend.q_stride[2] * size;
  x.attend.slots.len = x.len = scratch.take<int32_t>(x.attend.B * x.attend.Hkv);
  x.attend.out = scratch.take<char>(x.attend.B * R * x.attend.H * x.attend.D * size);
  x.attend.lse = scratch.take<float>(x.attend.B * x.attend.H * R);
  return x;
}

int64_t kv_attend_score_cuda_scratch(const kv_attend_score *a) {
  Cutter scratch = {nullptr, 0};
  int64_t bytes = kv_attend_cuda_scratch(&a->attend);
  if (a->span < 0) return bytes;
  const Span x = span_of(a, scratch);
  const int64_t more = kv_attend_cuda_scratch(&x.attend);
  return scratch.bytes + (more > bytes ? more : bytes);
}

int kv_attend_score_cuda(const kv_attend_score *a, void *memory, void *stream) {
  const int64_t heads = a->attend.B * a->attend.Hkv, R = a->score.rows.R;
  Cutter scratch = {memory, 0};
  kv_score score = a->score;
  kv_last_rows(&a->attend, &score.rows);
  if (a->span >= 0 && heads * R > 0) {
    const Span x = span_of(a, scratch);
    int error = launch<span_kernel>(dim3((unsigned)((heads + 255) / 256)), 256, 0, stream, a->attend.slots.len, heads,
                                    a->span, x.len);
    if (!error) error = kv_attend_cuda(&x.attend, scratch.take<char>(0), stream);
    if (error) return error;
    score.rows.lse = x.attend.lse, score.rows.lse_stride[0] = a->attend.H * R, score.rows.lse_stride[1] = R;
  }
  const int error = kv_attend_cuda(&a->attend, scratch.take<char>(0), stream);
  return error ? error : kv_score_cuda(&score, nullptr, stream);
}
