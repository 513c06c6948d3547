import Foundation
import MLXInferClient

/// How fast an answer came, seen from here.
struct Speed: Equatable {
    private(set) var first: Duration?
    private(set) var last: Duration?

    /// A piece of the answer has come, so long after the request.
    mutating func piece(after time: Duration) {
        first = first ?? time
        last = time
    }

    /// One line about it; the tokens are the server's count.
    func summary(_ usage: Usage) -> String {
        var parts = ["\(usage.completionTokens) tokens"]
        if let first, let last, last > first, usage.completionTokens > 1 {
            parts.append(String(format: "%.1f tokens/s", Double(usage.completionTokens - 1) / Self.seconds(last - first)))
        }
        if let first { parts.append(String(format: "%.2f s to the first", Self.seconds(first))) }
        if usage.cachedTokens > 0 { parts.append("\(usage.cachedTokens) of \(usage.promptTokens) prompt tokens from the cache") }
        return parts.joined(separator: ", ")
    }

    private static func seconds(_ time: Duration) -> Double {
        Double(time.components.seconds) + Double(time.components.attoseconds) / 1e18
    }
}
