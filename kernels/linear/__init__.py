"""Products that compute a row alike in any company.

Start with `product.py`.
"""
