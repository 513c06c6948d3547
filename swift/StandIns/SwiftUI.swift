// Declarations of the parts of SwiftUI that the examples and tutorials use, written from Apple's documentation, so that a system without
// SwiftUI can check the types of their views. Nothing here runs, and no package contains this file.
@_exported import Foundation
@_exported import Observation

private func declared<Value>() -> Value { fatalError("a declaration") }

// MARK: Views

@MainActor @preconcurrency public protocol View {
    associatedtype Body: View
    @ViewBuilder @MainActor @preconcurrency var body: Body { get }
}

extension Never: View {
    public var body: Never { return declared() }
}

extension Optional: View where Wrapped: View {
    public var body: Never { return declared() }
}

public protocol PrimitiveView: View where Body == Never {}

extension PrimitiveView {
    public var body: Never { return declared() }
}

public struct EmptyView: PrimitiveView {}
public struct Conditional<First, Second>: PrimitiveView {}
public struct TupleView<Content>: PrimitiveView {}

@resultBuilder public struct ViewBuilder {
    public static func buildExpression<Content: View>(_ content: Content) -> Content { content }
    public static func buildBlock() -> EmptyView { declared() }
    public static func buildBlock<Content: View>(_ content: Content) -> Content { content }
    public static func buildBlock<each Content: View>(_ content: repeat each Content) -> TupleView<(repeat each Content)> { declared() }
    public static func buildIf<Content: View>(_ content: Content?) -> Content? { content }
    public static func buildEither<First: View, Second: View>(first: First) -> Conditional<First, Second> { declared() }
    public static func buildEither<First: View, Second: View>(second: Second) -> Conditional<First, Second> { declared() }
}

public struct Text: PrimitiveView {
    public init<Content: StringProtocol>(_ content: Content) {}
}

public struct Image: PrimitiveView {
    public init(systemName: String) {}
    public func resizable() -> Image { self }
}

public struct Label: PrimitiveView {
    public init<Title: StringProtocol>(_ title: Title, systemImage: String) {}
}

public struct Spacer: PrimitiveView {
    public init() {}
}

public struct ProgressView: PrimitiveView {
    public init() {}
}

public struct ButtonRole: Sendable {
    public static let (destructive, cancel) = (ButtonRole(), ButtonRole())
}

public struct Button: PrimitiveView {
    public init<Title: StringProtocol>(_ title: Title, action: @escaping @MainActor () -> Void) {}
    public init<Title: StringProtocol>(_ title: Title, systemImage: String, action: @escaping @MainActor () -> Void) {}
    public init<Title: StringProtocol>(_ title: Title, role: ButtonRole?, action: @escaping @MainActor () -> Void) {}
}

public struct TextField: PrimitiveView {
    public init<Title: StringProtocol>(_ title: Title, text: Binding<String>) {}
    public init<Title: StringProtocol>(_ title: Title, text: Binding<String>, axis: Axis) {}
}

public enum Axis: Sendable { case horizontal, vertical }

public struct VStack<Content: View>: PrimitiveView {
    public init(alignment: HorizontalAlignment = .center, spacing: CGFloat? = nil, @ViewBuilder content: () -> Content) {}
}

public struct HStack<Content: View>: PrimitiveView {
    public init(alignment: VerticalAlignment = .center, spacing: CGFloat? = nil, @ViewBuilder content: () -> Content) {}
}

public struct ScrollView<Content: View>: PrimitiveView {
    public init(@ViewBuilder content: () -> Content) {}
}

public struct DisclosureGroup<Content: View>: PrimitiveView {
    public init<Title: StringProtocol>(_ title: Title, @ViewBuilder content: @escaping () -> Content) {}
}

public struct NavigationSplitView<Sidebar: View, Detail: View>: PrimitiveView {
    public init(@ViewBuilder sidebar: () -> Sidebar, @ViewBuilder detail: () -> Detail) {}
}

public struct List<Selection: Hashable, Content: View>: PrimitiveView {
    public init(selection: Binding<Selection?>?, @ViewBuilder content: () -> Content) {}
}

public struct Picker<Selection: Hashable, Content: View>: PrimitiveView {
    public init<Title: StringProtocol>(_ title: Title, selection: Binding<Selection>, @ViewBuilder content: () -> Content) {}
}

public struct ForEach<Data: RandomAccessCollection, ID: Hashable, Content: View>: PrimitiveView {
    public init(_ data: Data, id: KeyPath<Data.Element, ID>, @ViewBuilder content: @escaping (Data.Element) -> Content) {}
}

extension ForEach where Data.Element: Identifiable, ID == Data.Element.ID {
    public init(_ data: Data, @ViewBuilder content: @escaping (Data.Element) -> Content) {}
}

// MARK: Shapes and measures

public enum HorizontalAlignment: Sendable { case leading, center, trailing }
public enum VerticalAlignment: Sendable { case top, center, bottom }
public enum Alignment: Sendable { case leading, center, trailing }
public enum UnitPoint: Sendable { case top, center, bottom }
public enum Font: Sendable { case body, caption, headline }

public protocol ShapeStyle: Sendable {}
public protocol Shape: Sendable {}

public struct Color: ShapeStyle, PrimitiveView {
    public static let (accentColor, clear) = (Color(), Color())
    public func opacity(_ opacity: Double) -> Color { self }
}

extension ShapeStyle where Self == Color {
    public static var red: Color { declared() }
    public static var secondary: Color { declared() }
}

public struct RoundedRectangle: Shape {
    public init(cornerRadius: CGFloat) {}
}

public protocol LabelStyle {}
public struct IconOnlyLabelStyle: LabelStyle {}
extension LabelStyle where Self == IconOnlyLabelStyle {
    public static var iconOnly: IconOnlyLabelStyle { declared() }
}

public protocol TextSelectability {}
public struct EnabledTextSelectability: TextSelectability {}
extension TextSelectability where Self == EnabledTextSelectability {
    public static var enabled: EnabledTextSelectability { declared() }
}

public struct KeyEquivalent: ExpressibleByExtendedGraphemeClusterLiteral, Sendable {
    public init(extendedGraphemeClusterLiteral value: Character) {}
}

extension View {
    public func font(_ font: Font?) -> some View { self }
    public func foregroundStyle(_ style: some ShapeStyle) -> some View { self }
    public func background(_ style: some ShapeStyle, in shape: some Shape) -> some View { self }
    public func padding(_ length: CGFloat) -> some View { self }
    public func padding() -> some View { self }
    public func frame(width: CGFloat? = nil, height: CGFloat? = nil, alignment: Alignment = .center) -> some View { self }
    public func frame(maxWidth: CGFloat? = nil, maxHeight: CGFloat? = nil, alignment: Alignment = .center) -> some View { self }
    public func scaledToFit() -> some View { self }
    public func defaultScrollAnchor(_ anchor: UnitPoint?) -> some View { self }
    public func textSelection(_ selectability: some TextSelectability) -> some View { self }
    public func lineLimit(_ limit: ClosedRange<Int>) -> some View { self }
    public func labelStyle(_ style: some LabelStyle) -> some View { self }
    public func disabled(_ disabled: Bool) -> some View { self }
    public func tag(_ tag: some Hashable) -> some View { self }
    public func onSubmit(_ action: @escaping () -> Void) -> some View { self }
    public func onTapGesture(count: Int = 1, perform action: @escaping () -> Void) -> some View { self }
    public func keyboardShortcut(_ key: KeyEquivalent) -> some View { self }
    public func contextMenu(@ViewBuilder menuItems: () -> some View) -> some View { self }
    public func toolbar(@ViewBuilder content: () -> some View) -> some View { self }
    public func task(@_inheritActorContext _ action: @escaping @Sendable () async -> Void) -> some View { self }
    public func dropDestination<Item: Transferable>(
        for type: Item.Type, action: @escaping ([Item], CGPoint) -> Bool, isTargeted: @escaping (Bool) -> Void = { _ in }
    ) -> some View { self }
}

public protocol Transferable {}
extension URL: Transferable {}

// MARK: State

@propertyWrapper @dynamicMemberLookup public struct Binding<Value> {
    public init(get: @escaping () -> Value, set: @escaping (Value) -> Void) {}
    public var wrappedValue: Value {
        get { declared() }
        nonmutating set {}
    }
    public var projectedValue: Binding<Value> { self }
    public subscript<Subject>(dynamicMember path: WritableKeyPath<Value, Subject>) -> Binding<Subject> { declared() }
}

@propertyWrapper public struct State<Value> {
    public init(wrappedValue: Value) {}
    public init(initialValue: Value) {}
    public var wrappedValue: Value {
        get { declared() }
        nonmutating set {}
    }
    public var projectedValue: Binding<Value> { declared() }
}

@propertyWrapper @dynamicMemberLookup public struct Bindable<Value: AnyObject & Observable> {
    public init(wrappedValue: Value) {}
    public init(_ value: Value) {}
    public var wrappedValue: Value { declared() }
    public var projectedValue: Bindable<Value> { self }
    public subscript<Subject>(dynamicMember path: ReferenceWritableKeyPath<Value, Subject>) -> Binding<Subject> { declared() }
}

@propertyWrapper public struct Environment<Value> {
    public init(_ path: KeyPath<EnvironmentValues, Value>) {}
    public var wrappedValue: Value { declared() }
}

public struct EnvironmentValues {
    public var openWindow: OpenWindowAction { declared() }
}

@MainActor @preconcurrency public struct OpenWindowAction {
    public func callAsFunction(id: String) {}
}

// MARK: Apps

@MainActor @preconcurrency public protocol App {
    associatedtype Body: Scene
    @SceneBuilder @MainActor @preconcurrency var body: Body { get }
    @MainActor @preconcurrency init()
}

extension App {
    public static func main() {}
}

@MainActor @preconcurrency public protocol Scene {}

public struct Scenes<Content>: Scene {}

@resultBuilder public struct SceneBuilder {
    public static func buildBlock<Content: Scene>(_ content: Content) -> Content { content }
    public static func buildBlock<each Content: Scene>(_ content: repeat each Content) -> Scenes<(repeat each Content)> { declared() }
}

public struct Window<Content: View>: Scene {
    public init<Title: StringProtocol>(_ title: Title, id: String, @ViewBuilder content: () -> Content) {}
}

public struct WindowGroup<Content: View>: Scene {
    public init(@ViewBuilder content: () -> Content) {}
}

public struct MenuBarExtra<Content: View>: Scene {
    public init<Title: StringProtocol>(_ title: Title, systemImage: String, @ViewBuilder content: () -> Content) {}
}

public protocol MenuBarExtraStyle {}
public struct WindowMenuBarExtraStyle: MenuBarExtraStyle {}
extension MenuBarExtraStyle where Self == WindowMenuBarExtraStyle {
    public static var window: WindowMenuBarExtraStyle { declared() }
}

extension Scene {
    public func menuBarExtraStyle(_ style: some MenuBarExtraStyle) -> some Scene { self }
}
