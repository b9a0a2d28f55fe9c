"""Colors of the points that rays hit, in torch. The kernel of the GPU renderer computes the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cameras.scene import BOX, DIRECTIONAL, SPOT, Scene


@dataclass(frozen=True)
class Hits:
    """Points that rays hit; one row per hit, all in the world frame."""

    env: Tensor
    geom: Tensor
    point: Tensor
    """Position, m, [hit, 3]."""
    normal: Tensor
    """Unit normal that points away from the geom, [hit, 3]."""
    ray: Tensor
    """Direction of the ray, [hit, 3]; its length along the axis of the camera is 1."""
    depth: Tensor
    """Distance along the axis of the camera, m, [hit]."""
    axis: Tensor
    """Direction in which the camera looks, [hit, 3]."""
    pixel: Tensor
    """Size of a pixel at a depth of 1 m, m, [hit]."""


@dataclass(frozen=True)
class EnvAppearance:
    """Fields of the model that may differ between envs, with one row per env or one row for all."""

    rgba: Tensor
    """Colors of the geoms, [env, geom, 4]."""
    light_pos: Tensor
    """Positions of the lights without the headlight, [env, light, 3]."""
    light_dir: Tensor
    ambient: Tensor
    """Colors of all lights with the headlight, [env, light, 3]."""
    diffuse: Tensor
    specular: Tensor


class Shader:
    """Computes the colors of hits."""

    def __init__(self, scene: Scene):
        self._scene = scene
        textures = scene.textures
        self._texels = torch.from_numpy(textures.texels[:, :3].copy())
        arrays = {name: getattr(scene, name) for name in ("emission", "specular", "shininess")}
        self._material = {name: torch.from_numpy(values) for name, values in arrays.items()}

    def shade(
        self, hits: Hits, envs: EnvAppearance, geom_pos: Tensor, geom_mat: Tensor, lit: dict[int, Tensor]
    ) -> Tensor:
        """Return colors from 0 to 1, [hit, 3]. `geom_pos` [env, geom, 3] and `geom_mat` [env, geom, 3, 3] are the poses
        of the geoms; `lit` has for some lights whether they reach each hit, bool [hit]."""
        base = _rows(envs.rgba, hits.env, hits.geom)[:, :3]
        light = base * self._material["emission"][hits.geom, None]
        shine, gloss = self._material["shininess"][hits.geom], self._material["specular"][hits.geom, None]
        to_camera = torch.nn.functional.normalize(-hits.ray, dim=1)
        lights = self._scene.lights
        headlight = len(lights.kind) - 1
        for index, kind in enumerate(lights.kind.tolist()):
            ambient, diffuse, specular = (
                _rows(part, hits.env, index) for part in (envs.ambient, envs.diffuse, envs.specular)
            )
            forward = hits.axis if index == headlight else _rows(envs.light_dir, hits.env, index)
            strength = torch.ones_like(hits.depth)
            if kind == DIRECTIONAL:
                to_light = -torch.nn.functional.normalize(forward, dim=1)
            else:
                offset = _rows(envs.light_pos, hits.env, index) - hits.point
                distance = offset.norm(dim=1)
                to_light = offset / distance[:, None]
                constant, linear, quadratic = lights.attenuation[index].tolist()
                strength = 1.0 / (constant + linear * distance + quadratic * distance.square())
                if kind == SPOT:
                    cosine = -(to_light * torch.nn.functional.normalize(forward, dim=1)).sum(1)
                    cone = cosine.clamp(min=0.0).pow(float(lights.exponent[index]))
                    strength = strength * torch.where(cosine >= float(lights.cutoff[index]), cone, 0.0)
            facing = (hits.normal * to_light).sum(1).clamp(min=0.0)
            if index in lit:
                facing = facing * lit[index]
            halfway = torch.nn.functional.normalize(to_light + to_camera, dim=1)
            highlight = (hits.normal * halfway).sum(1).clamp(min=0.0).pow(shine) * (facing > 0.0)
            part = base * (ambient + diffuse * facing[:, None]) + gloss * specular * highlight[:, None]
            light = light + part * strength[:, None]
        return light.clamp(0.0, 1.0) * self._texture_colors(hits, geom_pos, geom_mat)

    def sky(self, rays: Tensor) -> Tensor:
        """Return the color of the background in the directions `rays` [ray, 3], from 0 to 1."""
        if self._scene.sky < 0:
            return torch.zeros_like(rays)
        x, y, z = rays.unbind(1)
        return self._sample_cube(self._scene.sky, torch.stack((x, z, -y), dim=1), torch.zeros_like(x))

    def _texture_colors(self, hits: Hits, geom_pos: Tensor, geom_mat: Tensor) -> Tensor:
        colors, scene = torch.ones_like(hits.point), self._scene
        for geom, texture in enumerate(scene.texture.tolist()):
            rows = (hits.geom == geom).nonzero()[:, 0] if texture >= 0 else ()
            if not len(rows):
                continue
            env = hits.env[rows]
            local = (hits.point[rows] - geom_pos[env, geom])[:, None] @ geom_mat[env, geom].float()
            x, y, z = local[:, 0].unbind(1)
            # Size of a pixel on the surface, seen face on.
            footprint = hits.depth[rows] * hits.pixel[rows]
            if scene.model.geom_type[geom] == BOX:
                size = torch.from_numpy(scene.model.geom_size[geom]).float()
                direction = torch.stack((x, y, z), dim=1) / size
                texels = footprint / (2.0 * float(size.max())) * float(scene.textures.widths[texture])
                colors[rows] = self._sample_cube(texture, direction, texels.log2())
            else:
                (su, sv), (u, v) = scene.texture_scale[geom].tolist(), scene.texture_offset[geom].tolist()
                # A surface that is seen at an angle is compressed along one direction; the mean is used.
                cosine = (hits.normal[rows] * torch.nn.functional.normalize(hits.ray[rows], dim=1)).sum(1).abs()
                texels = footprint * su * float(scene.textures.widths[texture]) / cosine.clamp(min=0.05).sqrt()
                zero = torch.zeros_like(x, dtype=torch.int64)
                colors[rows] = self._sample(texture, zero, u + su * x, v - sv * y, texels.log2(), wrap=True)
        return colors

    def _sample_cube(self, texture: int, direction: Tensor, level: Tensor) -> Tensor:
        """Return the color of a cube texture, with OpenGL's choice of face and coordinates."""
        x, y, z = direction.unbind(1)
        size, axis = direction.abs().max(dim=1)
        positive = direction.gather(1, axis[:, None])[:, 0] > 0.0
        face = 2 * axis + (~positive).long()
        s = torch.stack((torch.where(positive, -z, z), x, torch.where(positive, x, -x)), dim=1)
        t = torch.stack((-y, torch.where(positive, z, -z), -y), dim=1)
        s, t = (part.gather(1, axis[:, None])[:, 0] / size for part in (s, t))
        return self._sample(texture, face, 0.5 * s + 0.5, 0.5 * t + 0.5, level, wrap=False)

    def _sample(self, texture: int, face: Tensor, s: Tensor, t: Tensor, level: Tensor, wrap: bool) -> Tensor:
        """Return the color at texture coordinates, interpolated between four texels of the nearest mipmap level."""
        textures = self._scene.textures
        level = level.round().long().clamp(0, int(textures.levels[texture]) - 1)
        width = torch.tensor(int(textures.widths[texture])) >> level
        height = torch.tensor(int(textures.heights[texture])) >> level
        start = torch.from_numpy(textures.starts[texture]).long()[level] + face * width * height
        x, y = s * width - 0.5, t * height - 0.5
        column, row = x.floor(), y.floor()
        fx, fy = (x - column)[:, None], (y - row)[:, None]
        column, row = column.long(), row.long()

        def texel(dx: int, dy: int) -> Tensor:
            c, r = column + dx, row + dy
            if wrap:
                c, r = c % width, r % height
            else:
                c, r = torch.minimum(c.clamp(min=0), width - 1), torch.minimum(r.clamp(min=0), height - 1)
            return self._texels[start + r * width + c].float()

        top = texel(0, 0) * (1.0 - fx) + texel(1, 0) * fx
        bottom = texel(0, 1) * (1.0 - fx) + texel(1, 1) * fx
        return (top * (1.0 - fy) + bottom * fy) / 255.0


def _rows(values: Tensor, env: Tensor, item: Tensor | int) -> Tensor:
    """Return `values[env, item]` for a tensor [env, item, ...] whose first dimension may be 1."""
    return values[0 if len(values) == 1 else env, item].expand(len(env), -1).float()
