/* All layers of a plain network in one call. */

#include "kernels.h"

/* Of each struct its size, in the order of native.py: Python's must be the same. */
void dlm_sizes(int64_t *sizes) {
  sizes[0] = sizeof(Product), sizes[1] = sizeof(Layer), sizes[2] = sizeof(Network), sizes[3] = sizeof(Run);
}

/* Floats of room for dlm_layers with n rows in so many spans. */
int64_t dlm_layers_room(const Network *net, int64_t n, int64_t spans) {
  int64_t shared = dlm_room(n, net->threads) + dlm_attention_room(spans, net->e, net->threads) + 2 * n;
  return shared + n * (3 * net->d + (3 * net->h + 2 * net->g) * net->e + 2 * net->f);
}

/* Row number `id` of the embeddings (v, d). */
static void embed(const Network *net, const void *table, int64_t id, float *out) {
  if (net->half) widen((const uint16_t *)table + id * net->d, net->d, out);
  else memcpy(out, (const float *)table + id * net->d, net->d * sizeof(float));
}

/* Each head of x (n, h, e), whose rows are `width` apart, is normed in place; `room` holds n * h * e floats. */
static void norm_heads(float *x, int64_t width, const float *weight, float eps, float *room, int64_t n, int64_t h,
                       int64_t e, int threads) {
  dlm_rms_norm(x, width, e, 0, weight, eps, room, 0, n, h, e, threads);
  for (int64_t i = 0; i < n; i++) memcpy(x + i * width, room + i * h * e, h * e * sizeof(float));
}

/* qkv (n, width) of a layer from normed (n, d). */
static void project(const Network *net, const Layer *layer, const Run *run, const float *normed, float *qkv, int64_t n) {
  int64_t width = (net->h + 2 * net->g) * net->e;
  for (int64_t i = 0, at = 0; i < 3 && layer->qkv[i].n; at += layer->qkv[i++].n)
    dlm_product(layer->qkv + i, normed, net->d, qkv + at, width, n, 0, run->room, net->threads);
}

/* The same of the first layer, of n ids: computed for tokens that are new, and kept. Of a network of 4 layers that spares
   5 % of the time. `rows` and `normed` are (n, d), `fresh` is (n,). */
static void project_tokens(const Network *net, const Layer *layer, const Run *run, const void *table,
                           const int64_t *ids, int64_t *fresh, float *rows, float *normed, float *qkv) {
  int64_t n = run->n, d = net->d, width = (net->h + 2 * net->g) * net->e, m = 0;
  for (int64_t i = 0; i < n; i++)
    if (!run->known[ids[i]]) {
      run->known[ids[i]] = 1;
      embed(net, table, ids[i], rows + m * d);
      fresh[m++] = ids[i];
    }
  if (m) {
    dlm_rms_norm(rows, d, d, 0, layer->attn_norm, net->eps, normed, 0, m, 1, d, net->threads);
    project(net, layer, run, normed, qkv, m);
  }
  for (int64_t i = 0; i < m; i++) memcpy(run->projected + fresh[i] * width, qkv + i * width, width * sizeof(float));
  for (int64_t i = 0; i < n; i++) memcpy(qkv + i * width, run->projected + ids[i] * width, width * sizeof(float));
}

/* Final hidden states (w, d) of the output rows, after the last norm, from the rows of a table (v, d) that n ids name;
   returns the place of an id that is not in it, or -1. run->room holds dlm_layers_room(net, n, spans) floats. taps
   (n, count, d) is filled with the outputs of `count` layers, those numbers in `tapped`, of all rows. */
int64_t dlm_layers(const Network *net, const Layer *layers, const Run *run, const float *last_norm, const void *table,
                   int64_t v, const int64_t *ids, const int64_t *output_rows, int64_t w, float *out,
                   const int64_t *tapped, int64_t count, float *taps) {
  int64_t n = run->n, d = net->d, h = net->h, g = net->g, e = net->e, f = net->f, width = (h + 2 * g) * e;
  int threads = net->threads;
  float *room = run->room, *attention = room + dlm_room(n, threads);
  int64_t *fresh = (int64_t *)(attention + dlm_attention_room(run->spans, e, threads));
  float *normed = (float *)(fresh + n), *qkv = normed + n * d;
  float *queries = qkv + n * width, *found = queries + n * h * e, *wide = found + n * h * e, *act = wide + n * f;
  float *few = act + n * f, *x = few + n * d;
  int last_tapped = 0;
  for (int64_t t = 0; t < count; t++) last_tapped |= tapped[t] == net->layers - 1;
  for (int64_t i = 0; i < n; i++) {
    if (ids[i] < 0 || ids[i] >= v) return i;
    embed(net, table, ids[i], x + i * d);
  }
  for (int64_t number = 0; number < net->layers; number++) {
    const Layer *layer = layers + number;
    int64_t before = number * run->layer_stride * (net->half ? 2 : 4);
    void *keys = (char *)run->keys + before, *values = (char *)run->values + before;
    if (number == 0 && run->known) {
      project_tokens(net, layer, run, table, ids, fresh, few, normed, qkv);
    } else {
      dlm_rms_norm(x, d, d, 0, layer->attn_norm, net->eps, normed, 0, n, 1, d, threads);
      project(net, layer, run, normed, qkv, n);
    }
    if (layer->q_norm) {
      norm_heads(qkv, width, layer->q_norm, net->eps, queries, n, h, e, threads);
      norm_heads(qkv + h * e, width, layer->k_norm, net->eps, queries, n, g, e, threads);
    }
    dlm_rotate(qkv, width, run->cos, run->sin, queries, n, h, e, net->r, threads);
    if (net->half) {
      dlm_rotate(qkv + h * e, width, run->cos, run->sin, found, n, g, e, net->r, threads);
      dlm_write_halves(found, g * e, run->slots, keys, n, g * e, threads);
      dlm_write_halves(qkv + (h + g) * e, width, run->slots, values, n, g * e, threads);
    } else {
      dlm_write(qkv + h * e, width, qkv + (h + g) * e, width, run->cos, run->sin, run->slots, keys, values, n, g, e,
                net->r, threads);
    }
    const int64_t *rows = run->all_rows;
    if (number == net->layers - 1 && !last_tapped) { /* from here on only the output rows */
      for (int64_t i = 0; i < w; i++) memcpy(few + i * d, x + output_rows[i] * d, d * sizeof(float));
      x = few, n = w, rows = output_rows;
    }
    dlm_paged_attention(queries, h * e, keys, values, net->half, run->starts, run->positions, run->visible, run->tables,
                        run->table_width, run->block_lengths, rows, found, attention, run->spans, n, h, g, e,
                        run->page_size, 1.0f / sqrtf((float)e), threads);
    dlm_product(&layer->o, found, h * e, x, d, n, 1, room, threads);
    dlm_rms_norm(x, d, d, 0, layer->mlp_norm, net->eps, normed, 0, n, 1, d, threads);
    dlm_gated(&layer->gate, &layer->up, normed, d, act, n, wide, room, threads);
    dlm_product(&layer->down, act, f, x, d, n, 1, room, threads);
    for (int64_t t = 0; t < count; t++)
      for (int64_t i = 0; i < n && tapped[t] == number; i++)
        memcpy(taps + (i * count + t) * d, x + i * d, d * sizeof(float));
  }
  if (last_tapped) {
    for (int64_t i = 0; i < w; i++) memcpy(few + i * d, x + output_rows[i] * d, d * sizeof(float));
    x = few, n = w;
  }
  dlm_rms_norm(x, d, d, 0, last_norm, net->eps, out, 0, n, 1, d, threads);
  return -1;
}
