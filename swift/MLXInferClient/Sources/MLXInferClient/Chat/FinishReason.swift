/// Why an answer ended.
public enum FinishReason: Sendable, Hashable, RawRepresentable, Decodable {
    /// The model had said everything, or a stop string came.
    case stop
    /// The limit of tokens was reached.
    case length
    /// The model wants tools to be called.
    case toolCalls
    /// A filter ended it.
    case contentFilter
    /// A reason that this version of the package does not know.
    case other(String)

    public init(rawValue: String) {
        self = [FinishReason.stop, .length, .toolCalls, .contentFilter].first { $0.rawValue == rawValue } ?? .other(rawValue)
    }

    public init(from decoder: any Decoder) throws {
        self.init(rawValue: try decoder.singleValueContainer().decode(String.self))
    }

    public var rawValue: String {
        switch self {
        case .stop: "stop"
        case .length: "length"
        case .toolCalls: "tool_calls"
        case .contentFilter: "content_filter"
        case .other(let name): name
        }
    }
}
