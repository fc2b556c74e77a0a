/* What the three kernels of decode share: how the slots of a head are cut into splits, and how the new row is
 * stored. */
#ifndef KV_DECODE_CUH
#define KV_DECODE_CUH
#include "stream.cuh"

/* in lanes.cuh a split's size is a multiple of STEP; in the other kernels, of a tile's keys */
constexpr int STEP = 64;
/* approximate limit on the splits of all heads together: more would not keep a GPU busier */
constexpr int BLOCKS = 4096;

/* Returns the most query heads of a GQA group for which lanes.cuh is used; 0 for packed rows in 16 bits. */
static constexpr int most_lanes(bool is_16_bits, bool is_packed) { return !is_16_bits ? 4 : is_packed ? 0 : 2; }

static bool is_packed(const kv_decode &a) {
  return a.slots.k_kind != KV_AS_COMPUTED || a.slots.v_kind != KV_AS_COMPUTED;
}

struct Scratch {
  Parts parts;  /* in lanes.cuh `count` has the number of a head's finished splits, 0 at the start */
  float *logit; /* [B, Hkv, G, C] logits in log2 units, or NULL if no probs are wanted */
};

/* Cuts the scratch of a call into arrays. tile: query heads of a tile. */
static Scratch scratch_of(const kv_decode *a, int64_t tile, Cutter &scratch) {
  const int64_t heads = a->B * a->Hkv, whole = (a->rows_prefix + a->rows + 2 * STEP - 1) / (2 * STEP);
  int64_t splits = heads > BLOCKS / MOST_SPLITS ? BLOCKS / heads : MOST_SPLITS;
  if (splits > whole) splits = whole;
  const int64_t least = a->prefix.len ? 2 : 1;
  if (splits < least) splits = least;
  const Parts parts = parts_of(scratch, heads, a->H / a->Hkv, tile, splits, a->D);
  return {parts, a->probs ? scratch.take<float>(a->B * a->H * a->C) : nullptr};
}

/* Returns the number of a kv head's slots in the prefix. */
KV_DEVICE int prefix_len(const kv_decode &a, int64_t head) { return a.prefix.len ? a.prefix.len[head] : 0; }

/* How a head's slots are cut into splits. A split has either slots of the prefix or the head's own slots, so there
 * may be one split more than if all slots were cut together. */
struct Cut {
  int size, before, splits; /* size: slots of a split; before: splits of the prefix; splits: of all slots */
};

template <int KEYS>
KV_DEVICE Cut cut_of(const kv_decode &a, const Parts &x, int64_t head, int least = 2 * KEYS) {
  const int shared_len = prefix_len(a, head), len = a.slots.len[head];
  const int size = split_size<KEYS>(shared_len + len + 1, x.splits - (a.prefix.len ? 1 : 0), least);
  const int before = (shared_len + size - 1) / size;
  return {size, before, before + (len + size) / size};
}

/* One split of a head: slots c0 .. c1 - 1 of the prefix or, if `own`, of the head's own slots, of which the new row
 * is the last. `last`: the split contains the new row. */
template <class E>
struct Split {
  Columns k, v;
  int64_t new_row; /* the row of a.slots in which the new slot is stored */
  const E *new_k, *new_v;
  int c0, c1;
  bool own, last;
};

/* Returns n columns: n - 1 rows of `stored` from row `offset` on, then the new row at `chunk`, addressed with the
 * stride of the stored rows. If rows are packed, the new row is stored before it is read, so all n columns are
 * stored rows. at: the element of an unpacked row at which addresses begin. */
template <class E>
KV_DEVICE Columns slots_of(const void *stored, int64_t offset, const E *chunk, int n, int at, kv_kind kind,
                           const float *centre, int D) {
  const int stride = D * (int)sizeof(E);
  const E *const rows = static_cast<const E *>(stored) + offset * D + at;
  const bool packed = kind != KV_AS_COMPUTED;
  return columns_of(
      {(uint64_t)rows, (uint64_t)(chunk + at) - (uint64_t)(n - 1) * stride, stride, stride, packed ? n : n - 1, n},
      stored, offset, kind, centre, D);
}

/* Returns split number `split` of a kv head. at: the element of an unpacked row at which the columns' addresses
 * begin. */
template <class E>
KV_DEVICE Split<E> split_of(const kv_decode &a, const Cut &cut, int64_t head, int split, int at) {
  const int b = (int)head / (int)a.Hkv, h = (int)head % (int)a.Hkv;
  const int64_t *ks = a.chunk.k_stride, *vs = a.chunk.v_stride;
  const bool own = split >= cut.before;
  const int D = (int)a.D, len = a.slots.len[head], end = own ? len + 1 : prefix_len(a, head);
  const int c0 = (own ? split - cut.before : split) * cut.size, c1 = min(end, c0 + cut.size);
  const int most = own ? len + 1 : INT32_MAX;
  const int64_t offset = (own ? a.slots.offset : a.prefix.offset)[head];
  const E *const new_k = static_cast<const E *>(a.chunk.k) + b * ks[0] + h * ks[1];
  const E *const new_v = static_cast<const E *>(a.chunk.v) + b * vs[0] + h * vs[1];
  const Columns k =
      slots_of(own ? a.slots.k : a.prefix.k, offset, new_k, most, at, a.slots.k_kind, centre_of(a.slots, head, D), D);
  const Columns v = slots_of(own ? a.slots.v : a.prefix.v, offset, new_v, most, at, a.slots.v_kind, nullptr, D);
  return {k, v, offset + len, new_k, new_v, c0, c1, own, own && c1 == end};
}

/* Copies the head's new key and value after its stored slots, unless these are packed, and stores the new position. */
template <class E>
KV_DEVICE void append(const kv_decode &a, int64_t head, const Split<E> &x) {
  const int d = threadIdx.x * VECTOR<E>;
  if (d < a.D) {
    const int64_t at = x.new_row * a.D + d;
    if (a.slots.k_kind == KV_AS_COMPUTED)
      *reinterpret_cast<uint4 *>(static_cast<E *>(a.slots.k) + at) = *reinterpret_cast<const uint4 *>(x.new_k + d);
    if (a.slots.v_kind == KV_AS_COMPUTED)
      *reinterpret_cast<uint4 *>(static_cast<E *>(a.slots.v) + at) = *reinterpret_cast<const uint4 *>(x.new_v + d);
  }
  if (threadIdx.x == 0) a.slots.pos[x.new_row] = a.chunk.pos[head / a.Hkv];
}

/* Packs a head's new key, if `keys`, or its new value into row `row` of a.slots; does nothing if these rows are not
 * packed. All lanes of one warp must call it together. */
template <class E>
KV_DEVICE void append_packed(const kv_decode &a, int64_t head, int64_t row, bool keys) {
  const int b = (int)head / (int)a.Hkv, h = (int)head % (int)a.Hkv;
  const kv_kind kind = keys ? a.slots.k_kind : a.slots.v_kind;
  const int64_t *stride = keys ? a.chunk.k_stride : a.chunk.v_stride;
  if (kind == KV_AS_COMPUTED) return;
  pack_row(static_cast<const E *>(keys ? a.chunk.k : a.chunk.v) + b * stride[0] + h * stride[1], kind,
           keys ? centre_of(a.slots, head, a.D) : nullptr, (int)a.D,
           static_cast<unsigned char *>(keys ? a.slots.k : a.slots.v) + row * kv_packed_bytes(kind, a.D));
}

static bool by_lanes(const kv_decode *a) { return a->H <= most_lanes(a->dtype != KV_F32, is_packed(*a)) * a->Hkv; }

static bool by_ring(const kv_decode *a) { return a->dtype != KV_F32 && !by_lanes(a); }

static Outputs outputs_of(const kv_decode *a) {
  return {a->B, a->H, a->Hkv, 1, a->D, a->sinks, a->out, a->lse, by_ring(a) && kv_is_rotated(a->slots.v_kind)};
}
#endif
