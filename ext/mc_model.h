/* Entropy models in their stored form, and models from counted symbols. */
#ifndef MC_MODEL_H
#define MC_MODEL_H

#include "mc_rans.h"

/* Longest stored model. */
#define MC_MODEL_BYTES (3 + MC_CONTEXTS / 2 + MC_TABLES * (1 + 256 * 4))

/* Read one model and move *at past it; everything is checked. */
int mc_model_read(mc_model *model, const u8 **at, const u8 *end);

/* Write one model; returns the end of it. */
u8 *mc_model_write(const mc_model *model, u8 *at);

/* All that the blocks share: the exponent, and a model for each of `width` planes from the highest to the lowest. */
int mc_models_read(mc_models *models, unsigned width, const u8 *at, size_t length);
u8 *mc_models_write(const mc_models *models, unsigned width, u8 *at);

/* Do they decode alike? */
int mc_models_equal(const mc_models *a, const mc_models *b, unsigned width);

/* Frequencies that add up to 1 << bits, at least 1 for what occurs and never all for one symbol. `total` > 0. */
void mc_normalise(u16 frequency[256], const u32 counts[256], u32 total, unsigned bits);

/* How often each symbol occurs in each context. */
typedef u32 mc_counts[MC_CONTEXTS][256];

/* The model that stores these symbols in the fewest bytes, and how many, itself included; looks at `contexts` of them. */
double mc_model_fit(mc_model *model, const mc_counts counts, unsigned contexts);

#endif
