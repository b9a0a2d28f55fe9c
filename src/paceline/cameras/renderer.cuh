// Renders one tile of one image. A thread block draws the tile; on a CPU one thread does all of its work.
//
// This is the body of a Warp function (see gpu_renderer.py), which defines before it, as constants: WIDTH, HEIGHT,
// TILE_WIDTH, TILE_HEIGHT, TILES_X, TILES, SAMPLES (per pixel side), NEAR, FAR, CAMERA, NUM_CAMERAS, NUM_GEOMS (of the
// model), NUM_PRIMITIVES, NUM_DRAWN (primitives first, then geoms made of triangles), NUM_LIGHTS (without the
// headlight), NUM_CLUSTERS, MAX_VERTICES (of a cluster), VERTEX_FLOATS (3, or 6 with smooth normals), BLOCK (threads),
// SKY, TEXTURE_LEVELS, the outputs RGB, DEPTH, DISTANCE, SEGMENTATION, CLASSES, NORMALS, and SHADOWS.
//
// Frames: "cam" is the camera (x right, y up, z backward), "local" that of a geom. Rays are (x, y, -1) in cam, so the
// parameter of a point on a ray is its depth.

#if defined(__CUDA_ARCH__)
#define SHARED __shared__
#define LANES 32
#define LANE (int)(threadIdx.x & 31)
#define WARP (int)(threadIdx.x >> 5)
#define WARPS (int)(blockDim.x >> 5)
#define THREAD (int)(threadIdx.x)
#define THREADS (int)(blockDim.x)
#define SYNC __syncthreads()
#define SYNC_WARP __syncwarp()
#define NUM_WARPS (BLOCK / 32)
#define BALLOT(condition) __ballot_sync(0xffffffffu, condition)
#define FIRST_BIT(mask) (__ffs(mask) - 1)
#define AS_FLOAT(bits) __uint_as_float(bits)
#define AS_BITS(value) __float_as_uint(value)
#define KEEP_SMALLER(place, value) atomicMin(&(place), value)
#else
#define SHARED
#define LANES 1
#define LANE 0
#define WARP 0
#define WARPS 1
#define THREAD 0
#define THREADS 1
#define SYNC
#define SYNC_WARP
#define NUM_WARPS 1
#define BALLOT(condition) (unsigned)(condition)
#define FIRST_BIT(mask) __builtin_ctz(mask)
#define AS_FLOAT(bits) __builtin_bit_cast(float, (unsigned)(bits))
#define AS_BITS(value) __builtin_bit_cast(unsigned, (float)(value))
#define KEEP_SMALLER(place, value) (place) = (value) < (place) ? (value) : (place)
#endif

typedef unsigned long long Key;  // depth in the upper half, triangle in the lower half
constexpr int PLANE = 0, SPHERE = 2, CAPSULE = 3, ELLIPSOID = 4, CYLINDER = 5, BOX = 6;
constexpr int DIRECTIONAL = 0, SPOT = 2;
constexpr float NOTHING = 1e10f, SHADOW_OFFSET = 1e-4f;
// Layout of a geom in shared memory: rotation from cam to local (9), camera in local (3), size (3), type, center in cam
// (3), bounding radius, color (3).
constexpr int GEOM = 23, ORIGIN = 9, SIZE = 12, TYPE = 15, CENTER = 16, RADIUS = 19, COLOR = 20;
// Layout of a light in shared memory: position or direction to the light in cam (3), axis in cam (3), ambient (3),
// diffuse (3), specular (3).
constexpr int LIGHT = 15;
// Layout of a vertex in shared memory: position in cam (3), column and row in the buffer.
constexpr int VERTEX = 5;
constexpr int WORDS = (NUM_PRIMITIVES + 31) / 32;
constexpr int PIXELS_PER_LANE = 64 / LANES;

SHARED float geoms[(NUM_DRAWN > 0 ? NUM_DRAWN : 1) * GEOM];
SHARED float lights[(NUM_LIGHTS + 1) * LIGHT];
SHARED float vertices_in_cam[NUM_CLUSTERS > 0 ? NUM_WARPS * MAX_VERTICES * VERTEX : 1];
SHARED Key buffer[NUM_CLUSTERS > 0 ? TILE_WIDTH * TILE_HEIGHT * SAMPLES * SAMPLES : 1];

const int env = block / TILES, tile_x = (block % TILES % TILES_X) * TILE_WIDTH, tile_y = (block % TILES / TILES_X) * TILE_HEIGHT;
if (!arrays.due.data[env]) return;

const float* eye = arrays.cam_xpos.data + (size_t)(env * NUM_CAMERAS + CAMERA) * 3;
const float* axes = arrays.cam_xmat.data + (size_t)(env * NUM_CAMERAS + CAMERA) * 9;  // columns are the axes of cam
const float tangent = wp::tan(0.5f * 0.017453292519943295f * arrays.cam_fovy.data[(arrays.cam_fovy.shape[0] > 1 ? env : 0) * NUM_CAMERAS + CAMERA]);
const float step = 2.0f * tangent / (HEIGHT * SAMPLES);  // size of a sample at a depth of 1

auto world_to_cam = [&](const float* v, int i) { return axes[i] * v[0] + axes[3 + i] * v[1] + axes[6 + i] * v[2]; };

// Geoms and lights, once per block.
for (int g = THREAD; g < NUM_DRAWN; g += THREADS) {
    const int id = arrays.geom_ints.data[g * 4];
    const float* p = arrays.geom_xpos.data + (size_t)(env * NUM_GEOMS + id) * 3;
    const float* R = arrays.geom_xmat.data + (size_t)(env * NUM_GEOMS + id) * 9;
    const float* size = arrays.geom_size.data + (size_t)((arrays.geom_size.shape[0] > 1 ? env : 0) * NUM_GEOMS + id) * 3;
    const float* rgba = arrays.geom_rgba.data + (size_t)((arrays.geom_rgba.shape[0] > 1 ? env : 0) * NUM_GEOMS + id) * 4;
    float* s = geoms + g * GEOM;
    const float d[3] = {eye[0] - p[0], eye[1] - p[1], eye[2] - p[2]};
    for (int i = 0; i < 3; ++i) {
        for (int j = 0; j < 3; ++j) s[3 * i + j] = R[i] * axes[j] + R[3 + i] * axes[3 + j] + R[6 + i] * axes[6 + j];
        s[ORIGIN + i] = R[i] * d[0] + R[3 + i] * d[1] + R[6 + i] * d[2];
        s[SIZE + i] = size[i];
        s[CENTER + i] = -world_to_cam(d, i);
        s[COLOR + i] = rgba[i];
    }
    s[TYPE] = (float)(arrays.geom_ints.data[g * 4 + 1]);
    s[RADIUS] = arrays.geom_floats.data[g * 8];
}
for (int l = THREAD; l < NUM_LIGHTS + 1; l += THREADS) {
    float* s = lights + l * LIGHT;
    const float* constant = arrays.light_floats.data + l * 16;
    const bool head = l == NUM_LIGHTS;
    for (int i = 0; i < 3; ++i) {
        // The headlight shines along the axis of the camera.
        float axis = i == 2 ? -1.0f : 0.0f, position = 0.0f;
        if (!head) {
            const float* x = arrays.light_xpos.data + (size_t)(env * NUM_LIGHTS + l) * 3;
            const float d[3] = {x[0] - eye[0], x[1] - eye[1], x[2] - eye[2]};
            axis = world_to_cam(arrays.light_xdir.data + (size_t)(env * NUM_LIGHTS + l) * 3, i);
            position = world_to_cam(d, i);
        }
        s[i] = constant[0] == DIRECTIONAL ? -axis : position;
        s[3 + i] = axis;
        for (int part = 0; part < 3; ++part) {
            const auto& colors = part == 0 ? arrays.light_ambient : part == 1 ? arrays.light_diffuse : arrays.light_specular;
            s[6 + 3 * part + i] = head ? constant[7 + 3 * part + i]
                : constant[6] * colors.data[((colors.shape[0] > 1 ? env : 0) * NUM_LIGHTS + l) * 3 + i];
        }
    }
}
if (NUM_CLUSTERS > 0)
    for (int i = THREAD; i < TILE_WIDTH * TILE_HEIGHT * SAMPLES * SAMPLES; i += THREADS) buffer[i] = ~0ull;
SYNC;

// Half-spaces of a frustum with borders at left < x < right and bottom < y < top at a depth of 1.
auto sphere_in_frustum = [&](float x, float y, float z, float radius, float left, float right, float bottom, float top) {
    return z > NEAR - radius && (x - right * z) < radius * wp::sqrt(1.0f + right * right)
        && (left * z - x) < radius * wp::sqrt(1.0f + left * left) && (y - top * z) < radius * wp::sqrt(1.0f + top * top)
        && (bottom * z - y) < radius * wp::sqrt(1.0f + bottom * bottom);
};
auto border_x = [&](int pixel) { return (pixel * SAMPLES - 0.5f * WIDTH * SAMPLES) * step; };
auto border_y = [&](int pixel) { return (0.5f * HEIGHT * SAMPLES - pixel * SAMPLES) * step; };

// Nothing beyond the far plane is visible where only depths are drawn.
constexpr bool ONLY_DEPTH = !RGB && !SEGMENTATION && !CLASSES && !NORMALS;
// Triangles into the buffer: a warp takes a cluster, its lanes take first vertices and then triangles.
if (NUM_CLUSTERS > 0) {
    constexpr int BUFFER_WIDTH = TILE_WIDTH * SAMPLES, BUFFER_HEIGHT = TILE_HEIGHT * SAMPLES, MANY_PIXELS = 96;
    const float left = border_x(tile_x), right = border_x(tile_x + TILE_WIDTH);
    const float top = border_y(tile_y), bottom = border_y(tile_y + TILE_HEIGHT);
    float* corners = vertices_in_cam + WARP * MAX_VERTICES * VERTEX;
    for (int c = WARP; c < NUM_CLUSTERS; c += WARPS) {
        const float* k = arrays.cluster_floats.data + c * 8;
        const int* cluster = arrays.cluster_ints.data + c * 5;
        const float* s = geoms + cluster[0] * GEOM;
        const float x = k[0] - s[ORIGIN], y = k[1] - s[ORIGIN + 1], z = k[2] - s[ORIGIN + 2];
        const float depth = -(s[2] * x + s[5] * y + s[8] * z);
        if (!sphere_in_frustum(s[0] * x + s[3] * y + s[6] * z, s[1] * x + s[4] * y + s[7] * z, depth, k[3],
                left, right, bottom, top)) continue;
        if (ONLY_DEPTH && depth - k[3] > FAR) continue;
        // All triangles face away if the camera is behind the cone of their planes.
        if (x * k[4] + y * k[5] + z * k[6] >= k[7] * wp::sqrt(x * x + y * y + z * z) + k[3]) continue;

        SYNC_WARP;
        for (int v = LANE; v < cluster[2]; v += LANES) {
            const float* p = arrays.vertices.data + (size_t)(cluster[1] + v) * VERTEX_FLOATS;
            const float u[3] = {p[0] - s[ORIGIN], p[1] - s[ORIGIN + 1], p[2] - s[ORIGIN + 2]};
            float* corner = corners + v * VERTEX;
            for (int j = 0; j < 3; ++j) corner[j] = s[j] * u[0] + s[3 + j] * u[1] + s[6 + j] * u[2];
            const bool in_front = corner[2] < -NEAR;
            const float scale = 1.0f / (-corner[2] * step);
            // Column and row in the buffer; samples are at whole numbers.
            corner[3] = in_front ? corner[0] * scale - left / step - 0.5f : NOTHING;
            corner[4] = top / step - corner[1] * scale - 0.5f;
        }
        SYNC_WARP;

        float e[9], volume;  // edge planes and six times the signed volume with the camera
        int x0, x1, y0, y1;
        // Sets the samples that a triangle may cover; returns whether there are any.
        auto set_up = [&](int t) {
            const int packed = arrays.triangles.data[(cluster[3] + t) * 2];
            const float *a = corners + (packed & 255) * VERTEX, *b = corners + (packed >> 8 & 255) * VERTEX, *d = corners + (packed >> 16) * VERTEX;
            x0 = 0; x1 = BUFFER_WIDTH - 1; y0 = 0; y1 = BUFFER_HEIGHT - 1;
            const int behind = (a[3] == NOTHING) + (b[3] == NOTHING) + (d[3] == NOTHING);
            if (behind == 3) return false;
            // A triangle that crosses the near plane can cover any part of the tile.
            if (behind == 0) {
                if ((b[3] - a[3]) * (d[4] - a[4]) - (d[3] - a[3]) * (b[4] - a[4]) >= 0.0f) return false;
                x0 = wp::max(x0, (int)(wp::ceil(wp::min(a[3], wp::min(b[3], d[3]))))); x1 = wp::min(x1, (int)(wp::floor(wp::max(a[3], wp::max(b[3], d[3])))));
                y0 = wp::max(y0, (int)(wp::ceil(wp::min(a[4], wp::min(b[4], d[4]))))); y1 = wp::min(y1, (int)(wp::floor(wp::max(a[4], wp::max(b[4], d[4])))));
                if (x0 > x1 || y0 > y1) return false;
            }
            const float* v[3] = {a, b, d};
            for (int i = 0; i < 3; ++i) {
                const float *p = v[(i + 1) % 3], *q = v[(i + 2) % 3];
                e[3 * i] = p[1] * q[2] - p[2] * q[1]; e[3 * i + 1] = p[2] * q[0] - p[0] * q[2]; e[3 * i + 2] = p[0] * q[1] - p[1] * q[0];
            }
            volume = a[0] * e[0] + a[1] * e[1] + a[2] * e[2];
            return volume < 0.0f;
        };
        auto draw = [&](int t, int column, int row) {
            const float vx = left + (column + 0.5f) * step, vy = top - (row + 0.5f) * step;
            const float a = e[0] * vx + e[1] * vy - e[2], b = e[3] * vx + e[4] * vy - e[5], d = e[6] * vx + e[7] * vy - e[8];
            if (a > 0.0f || b > 0.0f || d > 0.0f) return;
            const float depth = volume / (a + b + d);
            if (depth >= NEAR) KEEP_SMALLER(buffer[row * BUFFER_WIDTH + column], ((Key)AS_BITS(depth) << 32) | (unsigned)(cluster[3] + t));
        };
        for (int base = 0; base < cluster[4]; base += LANES) {
            const int t = base + LANE;
            bool many = false;
            if (t < cluster[4] && set_up(t)) {
                many = (x1 - x0 + 1) * (y1 - y0 + 1) > MANY_PIXELS;
                if (!many) for (int row = y0; row <= y1; ++row) for (int column = x0; column <= x1; ++column) draw(t, column, row);
            }
            // All lanes share a triangle that covers many samples.
            for (unsigned mask = BALLOT(many); mask; mask &= mask - 1) {
                const int shared = base + FIRST_BIT(mask);
                set_up(shared);
                const int columns = x1 - x0 + 1, size = columns * (y1 - y0 + 1);
                for (int i = LANE; i < size; i += LANES) draw(shared, x0 + i % columns, y0 + i / columns);
            }
        }
    }
    SYNC;
}

// Returns the depth at which a ray enters a primitive, and the normal there in local (not normalized).
auto intersect = [&](int type, const float* size, float ox, float oy, float oz, float ux, float uy, float uz, float* n) {
    const float a0 = size[0], a1 = size[1], a2 = size[2];
    n[0] = 0.0f; n[1] = 0.0f; n[2] = 1.0f;
    if (type == PLANE) {
        if (uz >= -1e-9f || oz <= 0.0f) return NOTHING;
        const float t = -oz / uz;
        const bool inside = (a0 <= 0.0f || wp::abs(ox + t * ux) <= a0) && (a1 <= 0.0f || wp::abs(oy + t * uy) <= a1);
        return inside ? t : NOTHING;
    }
    if (type == SPHERE || type == ELLIPSOID) {
        const float ix = 1.0f / a0, iy = type == SPHERE ? ix : 1.0f / a1, iz = type == SPHERE ? ix : 1.0f / a2;
        const float dx = ux * ix, dy = uy * iy, dz = uz * iz, ex = ox * ix, ey = oy * iy, ez = oz * iz;
        const float a = dx * dx + dy * dy + dz * dz, b = dx * ex + dy * ey + dz * ez, c = ex * ex + ey * ey + ez * ez - 1.0f;
        const float d = b * b - a * c;
        if (d <= 0.0f) return NOTHING;
        const float t = (-b - wp::sqrt(d)) / a;
        n[0] = (ex + t * dx) * ix; n[1] = (ey + t * dy) * iy; n[2] = (ez + t * dz) * iz;
        return t;
    }
    if (type == BOX) {
        const float sx = ux < 0.0f ? -a0 : a0, sy = uy < 0.0f ? -a1 : a1, sz = uz < 0.0f ? -a2 : a2;
        const float ix = 1.0f / ux, iy = 1.0f / uy, iz = 1.0f / uz;
        const float nx = (-sx - ox) * ix, ny = (-sy - oy) * iy, nz = (-sz - oz) * iz;
        const float t = wp::max(nx, wp::max(ny, nz)), out = wp::min((sx - ox) * ix, wp::min((sy - oy) * iy, (sz - oz) * iz));
        if (!(t < out)) return NOTHING;
        n[0] = t == nx ? (ux < 0.0f ? 1.0f : -1.0f) : 0.0f;
        n[1] = t == ny ? (uy < 0.0f ? 1.0f : -1.0f) : 0.0f;
        n[2] = t == nz ? (uz < 0.0f ? 1.0f : -1.0f) : 0.0f;
        return t;
    }
    // Capsule or cylinder: the side, then the end at which the ray enters the infinite cylinder.
    const float a = ux * ux + uy * uy, b = ux * ox + uy * oy, c = ox * ox + oy * oy - a0 * a0, d = b * b - a * c;
    float z = oz;
    if (a > 1e-12f) {
        if (d <= 0.0f) return NOTHING;
        const float t = (-b - wp::sqrt(d)) / a;
        z = oz + t * uz;
        if (wp::abs(z) <= a1) { n[0] = ox + t * ux; n[1] = oy + t * uy; n[2] = 0.0f; return t; }
    } else if (c > 0.0f) return NOTHING;
    const float end = z > 0.0f ? a1 : -a1;
    if (type == CAPSULE) {
        const float e = oz - end, a3 = a + uz * uz, b3 = b + uz * e, d3 = b3 * b3 - a3 * (c + e * e);
        if (d3 <= 0.0f) return NOTHING;
        const float t = (-b3 - wp::sqrt(d3)) / a3;
        n[0] = ox + t * ux; n[1] = oy + t * uy; n[2] = e + t * uz;
        return t;
    }
    const float t = (end - oz) / uz, x = ox + t * ux, y = oy + t * uy;
    if (x * x + y * y > a0 * a0 || uz * end > 0.0f) return NOTHING;
    n[2] = end > 0.0f ? 1.0f : -1.0f;
    return t;
};

// Returns a color channel of a texture, interpolated between four texels of the nearest mipmap level.
auto sample = [&](int texture, int face, float s, float t, float level, bool wrap, float* rgb_out) {
    const int* info = arrays.texture_ints.data + texture * (3 + TEXTURE_LEVELS);
    const int chosen = wp::min(wp::max((int)(wp::floor(level + 0.5f)), 0), info[2] - 1);
    const int w = info[0] >> chosen, h = info[1] >> chosen;
    const size_t start = (size_t)info[3 + chosen] + (size_t)face * w * h;
    const float x = s * w - 0.5f, y = t * h - 0.5f, column = wp::floor(x), row = wp::floor(y), fx = x - column, fy = y - row;
    for (int channel = 0; channel < 3; ++channel) rgb_out[channel] = 0.0f;
    for (int corner = 0; corner < 4; ++corner) {
        int c = (int)(column) + (corner & 1), r = (int)(row) + (corner >> 1);
        if (wrap) { c %= w; c += c < 0 ? w : 0; r %= h; r += r < 0 ? h : 0; }
        else { c = wp::min(wp::max(c, 0), w - 1); r = wp::min(wp::max(r, 0), h - 1); }
        const float weight = (corner & 1 ? fx : 1.0f - fx) * (corner >> 1 ? fy : 1.0f - fy) / 255.0f;
        const unsigned char* texel = arrays.texels.data + (start + (size_t)r * w + c) * 4;
        for (int channel = 0; channel < 3; ++channel) rgb_out[channel] += weight * texel[channel];
    }
};
auto sample_cube = [&](int texture, float x, float y, float z, float level, float* rgb_out) {
    const float ax = wp::abs(x), ay = wp::abs(y), az = wp::abs(z);
    int face; float s, t, size;
    if (ax >= ay && ax >= az) { face = x > 0.0f ? 0 : 1; s = x > 0.0f ? -z : z; t = -y; size = ax; }
    else if (ay >= az) { face = y > 0.0f ? 2 : 3; s = x; t = y > 0.0f ? z : -z; size = ay; }
    else { face = z > 0.0f ? 4 : 5; s = z > 0.0f ? x : -x; t = -y; size = az; }
    sample(texture, face, 0.5f * s / size + 0.5f, 0.5f * t / size + 0.5f, level, false, rgb_out);
};

// Pixels: a warp takes 8x8 pixels, whose primitives its lanes select together.
constexpr int SQUARES_X = (TILE_WIDTH + 7) / 8, SQUARES = SQUARES_X * ((TILE_HEIGHT + 7) / 8);
for (int square = WARP; square < SQUARES; square += WARPS) {
    const int square_x = tile_x + (square % SQUARES_X) * 8, square_y = tile_y + (square / SQUARES_X) * 8;
    if (square_x >= WIDTH || square_y >= HEIGHT) continue;
    unsigned masks[WORDS > 0 ? WORDS : 1];
    for (int word = 0; word < WORDS; ++word) {
        masks[word] = 0;
        for (int base = 0; base < 32; base += LANES) {
            const int g = word * 32 + base + LANE;
            bool seen = false;
            if (g < NUM_PRIMITIVES) {
                const float* s = geoms + g * GEOM;
                // Planes have no bounding sphere.
                seen = s[RADIUS] <= 0.0f || sphere_in_frustum(s[CENTER], s[CENTER + 1], -s[CENTER + 2], s[RADIUS], border_x(square_x),
                    border_x(square_x + 8), border_y(square_y + 8), border_y(square_y));
            }
            masks[word] |= BALLOT(seen) << base;
        }
    }
    for (int i = 0; i < PIXELS_PER_LANE; ++i) {
        const int p = i * LANES + LANE, px = square_x + (p & 7), py = square_y + (p >> 3);
        if (px >= WIDTH || py >= HEIGHT || px >= tile_x + TILE_WIDTH || py >= tile_y + TILE_HEIGHT) continue;
        float color[3] = {0.0f, 0.0f, 0.0f};
        for (int subsample = 0; subsample < (RGB ? SAMPLES * SAMPLES : 1); ++subsample) {
            const int column = px * SAMPLES + subsample % SAMPLES, row = py * SAMPLES + subsample / SAMPLES;
            const float vx = (column + 0.5f - 0.5f * WIDTH * SAMPLES) * step, vy = (0.5f * HEIGHT * SAMPLES - row - 0.5f) * step;
            float best = NOTHING, n[3] = {0.0f, 0.0f, 1.0f};
            int hit = -1;
            if (NUM_CLUSTERS > 0) {
                const Key key = buffer[(row - tile_y * SAMPLES) * TILE_WIDTH * SAMPLES + column - tile_x * SAMPLES];
                if (key != ~0ull) {
                    best = AS_FLOAT((unsigned)(key >> 32));
                    const int* triangle = arrays.triangles.data + (size_t)(key & 0xffffffffu) * 2;
                    const int* cluster = arrays.cluster_ints.data + triangle[1] * 5;
                    const float* first = arrays.vertices.data + (size_t)cluster[1] * VERTEX_FLOATS;
                    const float *a = first + (triangle[0] & 255) * VERTEX_FLOATS, *b = first + (triangle[0] >> 8 & 255) * VERTEX_FLOATS;
                    const float* c = first + (triangle[0] >> 16) * VERTEX_FLOATS;
                    const float ex = b[0] - a[0], ey = b[1] - a[1], ez = b[2] - a[2], fx = c[0] - a[0], fy = c[1] - a[1], fz = c[2] - a[2];
                    n[0] = ey * fz - ez * fy; n[1] = ez * fx - ex * fz; n[2] = ex * fy - ey * fx;
                    hit = cluster[0];
                    if (VERTEX_FLOATS > 3) {
                        // The weights of b and c are the parts of the area that the hit point divides the triangle into.
                        const float* s = geoms + hit * GEOM;
                        float p[3];
                        for (int j = 0; j < 3; ++j) p[j] = s[ORIGIN + j] + best * (s[3 * j] * vx + s[3 * j + 1] * vy - s[3 * j + 2]) - a[j];
                        const float area = n[0] * n[0] + n[1] * n[1] + n[2] * n[2] + 1e-30f;
                        const float of_b = ((p[1] * fz - p[2] * fy) * n[0] + (p[2] * fx - p[0] * fz) * n[1] + (p[0] * fy - p[1] * fx) * n[2]) / area;
                        const float of_c = ((ey * p[2] - ez * p[1]) * n[0] + (ez * p[0] - ex * p[2]) * n[1] + (ex * p[1] - ey * p[0]) * n[2]) / area;
                        for (int j = 0; j < 3; ++j) p[j] = (1.0f - of_b - of_c) * a[3 + j] + of_b * b[3 + j] + of_c * c[3 + j];
                        if (p[0] != 0.0f || p[1] != 0.0f || p[2] != 0.0f) { n[0] = p[0]; n[1] = p[1]; n[2] = p[2]; }
                    }
                }
            }
            for (int word = 0; word < WORDS; ++word) {
                for (unsigned mask = masks[word]; mask; mask &= mask - 1) {
                    const int g = word * 32 + FIRST_BIT(mask);
                    const float* s = geoms + g * GEOM;
                    float m[3];
                    const float t = intersect((int)(s[TYPE]), s + SIZE, s[ORIGIN], s[ORIGIN + 1], s[ORIGIN + 2],
                        s[0] * vx + s[1] * vy - s[2], s[3] * vx + s[4] * vy - s[5], s[6] * vx + s[7] * vy - s[8], m);
                    if (t >= NEAR && t < best) { best = t; hit = g; n[0] = m[0]; n[1] = m[1]; n[2] = m[2]; }
                }
            }
            const size_t pixel = ((size_t)env * HEIGHT + py) * WIDTH + px;
            const float length = wp::sqrt(vx * vx + vy * vy + 1.0f);
            float cam_n[3] = {0.0f, 0.0f, 0.0f};
            if (hit >= 0) {
                const float* s = geoms + hit * GEOM;
                const float inverse = 1.0f / wp::sqrt(n[0] * n[0] + n[1] * n[1] + n[2] * n[2] + 1e-30f);
                for (int j = 0; j < 3; ++j) cam_n[j] = (s[j] * n[0] + s[3 + j] * n[1] + s[6 + j] * n[2]) * inverse;
            }
            if (subsample == 0) {
                if (DEPTH) arrays.depth_out.data[pixel] = hit >= 0 ? wp::min(best, FAR) : FAR;
                if (DISTANCE) arrays.distance_out.data[pixel] = hit >= 0 ? wp::min(best * length, FAR) : FAR;
                if (SEGMENTATION) arrays.segmentation_out.data[pixel] = hit >= 0 ? arrays.geom_ints.data[hit * 4] : -1;
                if (CLASSES) arrays.classes_out.data[pixel] = hit >= 0 ? (unsigned char)arrays.geom_ints.data[hit * 4 + 3] : 0;
                if (NORMALS) for (int j = 0; j < 3; ++j)
                    arrays.normals_out.data[pixel * 3 + j] = axes[3 * j] * cam_n[0] + axes[3 * j + 1] * cam_n[1] + axes[3 * j + 2] * cam_n[2];
            }
            if (!RGB) continue;
            float rgb[3] = {0.0f, 0.0f, 0.0f};
            if (hit < 0) {
                if (SKY >= 0) {
                    const float x = axes[0] * vx + axes[1] * vy - axes[2], y = axes[3] * vx + axes[4] * vy - axes[5], z = axes[6] * vx + axes[7] * vy - axes[8];
                    sample_cube(SKY, x, z, -y, 0.0f, rgb);
                }
            } else {
                const float* s = geoms + hit * GEOM;
                const float* material = arrays.geom_floats.data + hit * 8;
                const float at[3] = {best * vx, best * vy, -best};
                const float view[3] = {-vx / length, -vy / length, 1.0f / length};
                for (int j = 0; j < 3; ++j) rgb[j] = s[COLOR + j] * material[1];
                for (int l = 0; l <= NUM_LIGHTS; ++l) {
                    const float *light = lights + l * LIGHT, *constant = arrays.light_floats.data + l * 16;
                    const int kind = (int)(constant[0]);
                    float to[3], strength = 1.0f;
                    for (int j = 0; j < 3; ++j) to[j] = kind == DIRECTIONAL ? light[j] : light[j] - at[j];
                    const float distance = wp::sqrt(to[0] * to[0] + to[1] * to[1] + to[2] * to[2]);
                    const float inverse = 1.0f / wp::max(distance, 1e-9f);
                    for (int j = 0; j < 3; ++j) to[j] *= inverse;
                    if (kind != DIRECTIONAL) {
                        strength = 1.0f / (constant[1] + constant[2] * distance + constant[3] * distance * distance);
                        if (kind == SPOT) {
                            const float cosine = -(to[0] * light[3] + to[1] * light[4] + to[2] * light[5]);
                            strength *= cosine >= constant[4] ? wp::pow(wp::max(cosine, 0.0f), constant[5]) : 0.0f;
                        }
                    }
                    float facing = wp::max(0.0f, cam_n[0] * to[0] + cam_n[1] * to[1] + cam_n[2] * to[2]);
                    if (SHADOWS && l < NUM_LIGHTS && constant[7] > 0.0f && facing > 0.0f) {
                        for (int g = 0; g < NUM_PRIMITIVES && facing > 0.0f; ++g) {
                            const float* o = geoms + g * GEOM;
                            const float q[3] = {at[0] + SHADOW_OFFSET * cam_n[0], at[1] + SHADOW_OFFSET * cam_n[1], at[2] + SHADOW_OFFSET * cam_n[2]};
                            float m[3], from[3], along[3];
                            for (int j = 0; j < 3; ++j) {
                                from[j] = o[3 * j] * q[0] + o[3 * j + 1] * q[1] + o[3 * j + 2] * q[2] + o[ORIGIN + j];
                                along[j] = o[3 * j] * to[0] + o[3 * j + 1] * to[1] + o[3 * j + 2] * to[2];
                            }
                            const float t = intersect((int)(o[TYPE]), o + SIZE, from[0], from[1], from[2], along[0], along[1], along[2], m);
                            if (t > 0.0f && t < (kind == DIRECTIONAL ? 0.5f * NOTHING : distance)) facing = 0.0f;
                        }
                    }
                    float half[3];
                    for (int j = 0; j < 3; ++j) half[j] = to[j] + view[j];
                    const float half_length = wp::max(1e-9f, wp::sqrt(half[0] * half[0] + half[1] * half[1] + half[2] * half[2]));
                    const float aligned = wp::max(0.0f, (cam_n[0] * half[0] + cam_n[1] * half[1] + cam_n[2] * half[2]) / half_length);
                    // A highlight below 1/1000 is not visible.
                    const float power = facing > 0.0f && aligned > 0.0f ? material[3] * wp::log2(aligned) : -NOTHING;
                    const float highlight = power > -10.0f ? material[2] * wp::exp(power * 0.6931471805599453f) : 0.0f;
                    for (int j = 0; j < 3; ++j)
                        rgb[j] += strength * (s[COLOR + j] * (light[6 + j] + light[9 + j] * facing) + light[12 + j] * highlight);
                }
                for (int j = 0; j < 3; ++j) rgb[j] = wp::min(rgb[j], 1.0f);
                const int texture = arrays.geom_ints.data[hit * 4 + 2];
                if (texture >= 0) {
                    float local[3], texel[3];
                    for (int j = 0; j < 3; ++j) local[j] = s[3 * j] * at[0] + s[3 * j + 1] * at[1] + s[3 * j + 2] * at[2] + s[ORIGIN + j];
                    const float width = arrays.texture_ints.data[texture * (3 + TEXTURE_LEVELS)];
                    if ((int)(s[TYPE]) == BOX) {
                        const float widest = wp::max(s[SIZE], wp::max(s[SIZE + 1], s[SIZE + 2]));
                        sample_cube(texture, local[0] / s[SIZE], local[1] / s[SIZE + 1], local[2] / s[SIZE + 2],
                            wp::log2(best * step / (2.0f * widest) * width), texel);
                    } else {
                        const float cosine = wp::max(0.05f, wp::abs(cam_n[0] * view[0] + cam_n[1] * view[1] + cam_n[2] * view[2]));
                        sample(texture, 0, material[6] + material[4] * local[0], material[7] - material[5] * local[1],
                            wp::log2(best * step * material[4] * width / wp::sqrt(cosine)), true, texel);
                    }
                    for (int j = 0; j < 3; ++j) rgb[j] *= texel[j];
                }
            }
            for (int j = 0; j < 3; ++j) color[j] += rgb[j];
        }
        if (RGB) for (int j = 0; j < 3; ++j)
            arrays.rgb_out.data[(((size_t)env * HEIGHT + py) * WIDTH + px) * 3 + j] = (unsigned char)(color[j] * (255.0f / (SAMPLES * SAMPLES)) + 0.5f);
    }
}
