"""Handwritten digits with scikit-learn: principal components, a small neural network, nearest neighbours.

An ordinary program, which knows nothing of what multiplies its matrices.
"""

import warnings

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier


def main():
    images, digits = load_digits(return_X_y=True)
    images = images / 16.0
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits, test_size=0.25, random_state=0, stratify=digits
    )
    print(f"{len(train_x)} digits to learn from, {len(test_x)} to recognise, {images.shape[1]} pixels each")

    components = PCA(n_components=32, svd_solver="covariance_eigh").fit(train_x)
    kept = components.explained_variance_ratio_.sum()
    error = np.abs(components.inverse_transform(components.transform(test_x)) - test_x).mean()
    print(f"principal components: 32 keep {kept:.1%} of the variance, error per pixel {error:.3f}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a few passes are enough here
        network = MLPClassifier(hidden_layer_sizes=(128, 64), batch_size=128, max_iter=30, random_state=0)
        network.fit(train_x, train_y)
    report("neural network", network.predict(test_x), test_y)

    neighbours = KNeighborsClassifier(n_neighbors=3, metric="cosine", algorithm="brute")
    neighbours.fit(components.transform(train_x), train_y)
    report("nearest neighbours", neighbours.predict(components.transform(test_x)), test_y)


def report(name, predicted, wanted):
    right = int((predicted == wanted).sum())
    print(f"{name}: {right} of {len(wanted)} right ({right / len(wanted):.1%})")


if __name__ == "__main__":
    main()
