"""The part of mjlab's interface that Paceline uses, with one small task, because mjlab cannot be installed beside
Paceline's MuJoCo. docs/mjlab_users.md has the commands for mjlab itself."""
