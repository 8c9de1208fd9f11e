"""The rank board, under its documented name: see `hostprep.cuda.board`."""

from hostprep.cuda.board import BoardReader, BoardView, RankBoard, RankView, board_path

__all__ = ["BoardReader", "BoardView", "RankBoard", "RankView", "board_path"]
